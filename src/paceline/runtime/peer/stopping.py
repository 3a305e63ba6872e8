"""How a peer's part in a run ends, and how it goes on later.

After its last iteration it settles with the others. In a run that is stopped everybody does so after the
same iteration, and writes down where it stood; resumed, it begins there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from paceline.errors import RunStopped
from paceline.protocols.core.meeting import SETTLING
from paceline.protocols.core.operations import Operation
from paceline.protocols.core.peer import Done, Me, Peer, settles
from paceline.runtime.checkpoints.peer_files import load_peer, save_peer
from paceline.runtime.messages.workers import Meet, Met
from paceline.runtime.worker.link import StoreLink
from paceline.runtime.worker.paced import PacedWorker
from paceline.store.disk.folders import partial_of


class StoppablePeer(PacedWorker):
    """A peer, as far as its end is concerned."""

    _me: Me

    def __init__(self, link: StoreLink, protocol: Peer) -> None:
        super().__init__(link)
        self._protocol = protocol
        self._lane = 0
        self._iterations = 0
        self._until: int | None = None
        self._save_at: int | None = None
        self._saved = False
        self._before = 0
        """Iterations before the run was stopped that goes on."""

    def _carry_out(self, operation: Operation | Done) -> Any:
        raise NotImplementedError

    def _say(self, message: Meet, how: Callable[[Meet, tuple[int, ...]], Any]) -> Any:
        raise NotImplementedError

    def _meet(self, message: Meet) -> Met:
        raise NotImplementedError

    def _settle(self) -> None:
        """Bring to an end what is under way, with everybody who has come to the end."""
        self._say(Meet(retires=True), self._link.begin)
        self._lane = SETTLING
        steps, answer = self._protocol.settle(self._me), None
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration:
                return
            answer = self._carry_out(operation)

    def _leave(self) -> None:
        if self._model is not None and settles(self._protocol) and not self._saved:
            self._settle()
        super()._leave()

    # -- stopping and going on ----------------------------------------------------------------

    def _completed(self) -> None:
        """An iteration is; if the run was stopped and this is the last, leave what it takes to go on."""
        self._iterations += 1
        if self._iterations == self._until:
            if settles(self._protocol):
                self._settle()
            self._save()
            self._saved = True
            raise RunStopped("interrupted")
        if self._iterations == self._save_at:
            self._save_and_wait()

    def _save(self) -> None:
        assert self._optimizer is not None
        folder = partial_of(self._link.config.path / "checkpoint")
        own = None if self._shared else self._optimizer
        save_peer(folder, self._me, own, self._all_buffers(), self._stand())

    def _save_and_wait(self) -> None:
        """A checkpoint on the way: go on once all have saved theirs, or somebody could not."""
        why = ""
        try:
            self._save()
        except (OSError, SafetensorError) as error:
            why = f"rank {self.rank}: {error}"
        self._meet(Meet(saved=why))

    def _resume(self) -> None:
        """Begin where a stopped run ended."""
        folder, own = self._link.config.resume, None if self._shared else self._optimizer
        if folder is not None:
            self._find(load_peer(Path(folder), self._me, own, self._all_buffers()))
            self._before = self._position = self._me.count

    def _all_buffers(self) -> Any:
        return self._binding.layout.buffer_views(self._link.segments[0].bytes)
