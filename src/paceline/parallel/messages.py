"""What a worker of a mesh and the conductor of its run say to each other. Typed and small; no tensors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from paceline.decoding import MessageDecoder
from paceline.runtime.messages.workers import Failed, Hello
from paceline.store.work.due import LoaderPasses
from paceline.trace.events import Lookups


class Iteration(msgspec.Struct, frozen=True, array_like=True):
    """One iteration of one worker, as it goes on record. Times are of the machine's monotonic clock."""

    end_s: float
    busy_s: float
    """Of it, what was spent computing; the rest was waiting for others."""
    clock: int
    """Updates that the worker has made, this one included."""
    samples: int
    """Counted where a batch ends: at the last stage."""
    staleness: int
    """Updates between a batch's forward and its backward, here."""


class Did(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What a worker has done since it said so last."""

    iterations: tuple[Iteration, ...] = ()
    sent: dict[str, int] = {}
    """Bytes, along each axis."""
    values: dict[str, float] = {}
    """What its script reported."""
    lookups: Lookups | None = None
    """What looking up in its tables has cost."""


class LeadReady(msgspec.Struct, frozen=True, tag="Ready"):
    """The lead's model, all parts of it."""

    parameters: int
    weight_bytes: int
    samples_per_epoch: int | None
    batches_per_epoch: int | None


class Plan(msgspec.Struct, frozen=True, tag=True):
    """The script means to run so many epochs."""

    epochs: int


class Measured(msgspec.Struct, frozen=True, tag=True):
    """The lead has evaluated."""

    values: dict[str, float]
    seconds: float
    version: int
    samples: int


class Noted(msgspec.Struct, frozen=True, tag=True):
    """Something a person should read."""

    level: Literal["info", "warning"]
    text: str


class EndWork(msgspec.Struct, frozen=True, tag=True):
    """The script has ended training for all."""

    why: str


class PartSaved(msgspec.Struct, frozen=True, tag="Saved"):
    """My part of a checkpoint is on the disk; I wait for the word to go on."""

    updates: int
    samples: int


class ExchangeTorn(msgspec.Struct, frozen=True, tag="Torn"):
    """An exchange with another worker broke off: somebody must be lost."""

    text: str


class Bye(msgspec.Struct, frozen=True, tag=True):
    """My script is over, in good order."""

    stopped: bool = False
    resumable: bool = True
    """Whether what I saved is enough to go on from."""
    passes: LoaderPasses = LoaderPasses()
    """Over the loader."""
    samples_due: int | None = None
    """Samples of the epochs that they began, of all copies."""


class MeshWelcome(msgspec.Struct, frozen=True, tag="Welcome"):
    """The first word to a worker; the memory where all meet, and the board, come along."""


class GoOn(msgspec.Struct, frozen=True, tag=True):
    """All parts of the checkpoint are there."""


class EndRun(msgspec.Struct, frozen=True, tag="End"):
    """The run cannot go on: end at once."""

    blamed: int
    """Whose trouble the run's end is put down to."""


FromWorker = (
    Hello | Failed | Did | LeadReady | Plan | Measured | Noted | EndWork | PartSaved | ExchangeTorn | Bye
)
ToWorker = MeshWelcome | GoOn | EndRun

conductor_decoder: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
worker_decoder: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)


class MeshState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a split run stood, apart from its tensors: the same for all of its workers."""

    mesh: dict[str, int]
    protocol: str
    passes: int
    """Epochs that are behind it."""
    batches: int
    """Batches of the epoch it was in, of all copies together."""
    updates: int
    samples: int
    stepped_by: str
    schedule_steps: int = 0
    """Of the learning rate's schedule."""
    optimizer: dict[str, Any] = {}
    """Optimizer state that is not a tensor, by parameter and name."""
