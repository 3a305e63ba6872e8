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
from paceline.protocols.core.peer import Done
from paceline.runtime.checkpoints.peer_files import load_peer, save_peer
from paceline.runtime.messages.workers import Meet
from paceline.runtime.peer.carrier import Carrier
from paceline.runtime.peer.state import PeerState
from paceline.store.disk.checkpoint import make_room_for
from paceline.store.disk.folders import partial_of


class PeerEnding:
    """One peer's."""

    def __init__(
        self,
        peer: PeerState,
        carrier: Carrier,
        carry_out: Callable[[Operation | Done], Any],
        settled: Callable[[], None],
    ) -> None:
        """`settled`: told when all that was under way is in the weights."""
        self._peer, self._carrier, self._carry_out, self._settled = peer, carrier, carry_out, settled
        self._link = peer.trainer.link
        self._iterations = 0
        self._saved = False

    def settle(self) -> None:
        """Bring to an end what is under way, unless that was done when the run was stopped."""
        if self._peer.protocol.settles and not self._saved:
            self._settle()

    def _settle(self) -> None:
        """With everybody who has come to the end."""
        self._carrier.tell(Meet(retires=True))
        self._peer.lane = SETTLING
        steps, answer = self._peer.protocol.settle(self._peer.me), None
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration:
                self._settled()
                return
            answer = self._carry_out(operation)

    # -- stopping and going on ----------------------------------------------------------------

    def completed(self) -> None:
        """An iteration is; if the run was stopped and this is the last, leave what it takes to go on."""
        self._iterations += 1
        if self._iterations == self._peer.until:
            if self._peer.protocol.settles:
                self._settle()
            self._save()
            self._saved = True
            raise RunStopped("interrupted")
        if self._iterations == self._peer.save_at:
            self._save_and_wait()

    def _save(self) -> None:
        peer = self._peer
        folder = partial_of(self._link.config.path / "checkpoint")
        optimizer, buffers, trainer = self._own_optimizer(), peer.buffers(), peer.trainer
        own = folder, peer.me, optimizer, buffers, trainer.standing(), trainer.step_settings
        make_room_for(lambda: save_peer(*own), folder.parent, self._link.say)

    def _save_and_wait(self) -> None:
        """A checkpoint on the way: go on once all have saved theirs, or somebody could not."""
        why = ""
        try:
            self._save()
        except (OSError, SafetensorError) as error:
            why = f"rank {self._link.rank}: {error}"
        self._carrier.meet(Meet(saved=why))

    def resume(self) -> None:
        """Begin where a stopped run ended."""
        peer, folder = self._peer, self._link.config.resume
        if folder is not None:
            optimizer, buffers, trainer = self._own_optimizer(), peer.buffers(), peer.trainer
            trainer.go_on(load_peer(Path(folder), peer.me, optimizer, buffers, trainer.step_settings))
            peer.before = peer.trainer.schedulers.position = peer.me.count

    def _own_optimizer(self) -> Any:
        """The optimizer, if it is this worker's that steps."""
        return None if self._peer.trainer.shared else self._peer.trainer.optimizer
