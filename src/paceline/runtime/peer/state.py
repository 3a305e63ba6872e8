"""What everything that works for one peer knows of it: its model and memory, and what it heard last."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.protocols.core.peer import Me, Peer
from paceline.runtime.messages.workers import Met, Push
from paceline.runtime.worker.trainer import Trainer
from paceline.store.cutting import Cut
from paceline.store.layout import Layout
from paceline.store.vector import FlatVector


@dataclass
class PeerState:
    """One peer's, once its model is tied to the run."""

    protocol: Peer
    trainer: Trainer
    me: Me
    segment: Tensor
    """The memory of gradients and buffers."""
    gradient: list[Tensor]
    """The gradients in it, as long tensors."""
    cut: Cut
    """What the parameters consist of."""
    lane: int = 0
    """Under which joint operations are told of that it sleeps for."""
    record: Push | None = None
    """What is to be put on record of the iteration under way."""
    until: int | None = None
    """The last iteration, when the run is stopped."""
    save_at: int | None = None
    """The iteration after which the next checkpoint is due."""
    oldest: int = 0
    """An iteration that somebody is still in."""
    before: int = 0
    """Iterations before the run was stopped that goes on."""

    @property
    def layout(self) -> Layout:
        """How the model lies in memory."""
        return self.trainer.binding.layout

    def buffers(self) -> list[Tensor]:
        """All buffers of the model, whatever they hold."""
        return self.layout.buffer_views(self.segment)

    def like_parameters(self, vector: FlatVector) -> bool:
        """Whether a vector is as long as those of parameters are; else it is one of buffers."""
        return [part.numel() for part in vector.parts] == [part.numel() for part in self.gradient]

    def told(self) -> Push | None:
        """What is to be put on record, once."""
        record, self.record = self.record, None
        return record

    def heard(self, met: Met) -> Met:
        """An operation was carried out, and this was said with it."""
        self.me.members = met.members
        self.until, self.save_at, self.oldest = met.until, met.save_at, met.oldest
        if met.release is not None:
            self.trainer.schedulers.position = self.before + met.release.position
        return met
