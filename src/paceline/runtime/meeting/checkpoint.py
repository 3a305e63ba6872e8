"""Checkpoints of a run of peers that goes on.

All save after the same iteration, each its own files, and sleep until the run's books are beside them: then
nothing is under way, and the files are of one moment.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import torch

from paceline.runtime.meeting.membership import ReplicaMembership
from paceline.runtime.messages.workers import Met
from paceline.runtime.run.owner_view import OwnerView
from paceline.runtime.run.peer_start import PeerRun
from paceline.store.disk.checkpoint import Snapshot
from paceline.store.disk.folders import partial_of
from paceline.store.replicas import Parts, buffer_parts, parameter_parts


class PeerCheckpoints:
    """Agrees with all on an iteration, and waits until they have saved it."""

    def __init__(
        self,
        run: PeerRun,
        owner: OwnerView,
        standing: ReplicaMembership,
        mean: Callable[[Parts, Parts], float],
    ) -> None:
        self._run, self._owner, self._standing, self._mean = run, owner, standing, mean
        self._partial = partial_of(owner.config.path / "checkpoint")
        self._saved: dict[int, str] = {}
        """Who has, and what went wrong."""
        self._ended = False
        self.at: int | None = None
        """After how many iterations everybody saves."""

    def look(self) -> None:
        """If it is time: after the first iteration that nobody has completed the gradient of.

        Nobody can have heard of it too late, and nobody writes there before.
        """
        owner, version = self._owner, self._run.ledger.pacer.clocks.version
        if self._ended or self.at is not None or owner.ending or not owner.keeping.due(version):
            return
        if len(owner.living) == owner.config.workers:
            shutil.rmtree(self._partial, ignore_errors=True)
            self.at = self._standing.most + 1

    def saved(self, rank: int, why: str) -> dict[int, Met]:
        """A worker has, or could not; one that nobody saves with any more goes on at once."""
        if self._standing.iterations[rank] != self.at:
            return {rank: Met()}
        self._saved[rank] = why
        if len(self._saved) < self._owner.config.workers:
            return {}
        self._keep()
        return self._go_on()

    def end(self) -> dict[int, Met]:
        """Somebody is gone, or has done its last iteration: there will be none that all have done."""
        self._ended = True
        return self._go_on()

    def _go_on(self) -> dict[int, Met]:
        """Whoever waits may."""
        self.at, saved, self._saved = None, self._saved, {}
        return {rank: Met() for rank in saved}

    def _keep(self) -> None:
        """All sleep: add the books. Only then may they go on, and write there again."""
        ledger, keeping = self._run.ledger, self._owner.keeping
        version = ledger.pacer.clocks.version
        wrong = next((why for why in self._saved.values() if why), "")
        if wrong:
            keeping.fail(version, wrong)
        else:
            keeping.keep(version, ledger.samples, self._take)
            keeping.tell(wait=True)

    def _take(self) -> Callable[[], Snapshot]:
        """With the mean of all models, unless there is one model anyway."""
        lead, layout = self._owner.living[0], self._run.store.layout
        assert lead.segment is not None
        taken = self._run.snapshot(lead, self._owner.config.workers)
        if self._run.shared:
            return lambda: taken
        weights = torch.empty_like(self._run.store.weights)
        buffers = [part.clone() for part in buffer_parts(layout, lead.segment.bytes)]
        self._mean(parameter_parts(layout, weights), buffers)
        named = zip(layout.parameters, layout.weight_views(weights), strict=True)
        model = taken.model | {slot.name: view.clone() for slot, view in named}
        return lambda: taken._replace(model=model)
