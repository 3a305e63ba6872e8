"""What the store says to a worker. Typed and small; tensors never travel in it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from paceline.config import RunConfig
from paceline.decoding import MessageDecoder
from paceline.protocols.core.parts import Part
from paceline.protocols.paced.psp_distributed import PeerBarrier
from paceline.runtime.checkpoints.worker_state import WorkerState
from paceline.store.layout import Slot
from paceline.store.work.budget import Batch


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The run the worker takes part in."""

    config: RunConfig
    rank: int
    lead: bool = True
    """Whether it prints and evaluates for all."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Everybody is here; the descriptors are the worker's segment and its weights. Begin."""

    shared: bool
    """Whether the weights are one buffer for all, read-only for workers."""
    epoch: int
    """The epoch to begin with; not 0 when resumed."""
    position: int
    batch: Batch | None
    agrees: bool = False
    """Whether your model is the run's own after every step."""
    barrier: PeerBarrier | None = None
    """Where you decide yourself when to go on; the last descriptor is your host's board of all clocks."""
    ahead: bool = False
    """Whether you compute on a look-ahead, and not on the store's own weights."""
    rounds: int | None = None
    """How many batches you get per epoch: in lockstep exactly, else on average."""
    state: WorkerState | None = None
    """Where you stood when the run was stopped that goes on now."""
    tell: bool = False
    """With your first push, tell where you stand."""
    lead: bool = False
    """From here on you print and evaluate for all: whoever did so before is gone."""


class Lend(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 was lost before it could tell: register again, and send your initial values along."""


class Added(msgspec.Struct, frozen=True, tag=True):
    """Your gradient is in the weights. When you go on is your own business."""

    clock: int
    """How many iterations you have completed."""


class Release(msgspec.Struct, frozen=True, tag=True):
    """Your weights are fresh: compute."""

    version: int
    position: int
    """Where a prepared LR scheduler stands now."""
    batch: Batch | None = None
    distance: float | None = None
    """How far apart the replicas of peers are, if you asked."""
    over: bool = False
    """There is no further work."""
    skipped: bool = False
    """The step with your gradient in it was skipped: it was not finite, and a GradScaler expects that."""
    tell: bool = False
    """With your next push, tell where you stand: a checkpoint is due."""
    lead: bool = False
    """From here on you print and evaluate for all: whoever did so before is gone."""


class Joint(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the vectors of a joint operation travel. All who take part have been told, or are told now."""

    among: tuple[int, ...] = ()
    """Whose group reduces; empty: nobody's, but pairs send to each other."""
    row: dict[int, float] = {}
    """Whose vectors this worker gets, and in which shares."""
    takers: tuple[int, ...] = ()
    """Who gets this worker's, in a mixture."""
    total: float = 0.0
    """What all weights add up to."""
    changed: bool = False
    """Somebody has another gradient than travelled in buckets: average it anew, and use none from now on."""
    again: bool = False
    """Average it anew, this time."""


class Stand(msgspec.Struct, frozen=True, tag=True):
    """You have finished, the others have not: take part with nothing, and sleep on."""

    among: tuple[int, ...]
    buffers: bool = False
    lane: int = 0
    bucketed: bool = False
    plain: bool = True
    """Whether the vector is averaged as a whole (after the buckets, if it was bucketed)."""
    part: Part | None = None
    """Which of the model's tensors are averaged; None: all."""


class Show(msgspec.Struct, frozen=True, tag=True):
    """Take the mean of all models together, and sleep on."""

    share: float
    """Of your own in it."""
    counted: int
    """How many replicas the distance from the mean is taken over."""
    counts: bool
    """Whether yours is one of them."""
    hand_over: bool = False
    """Whether the run wants the mean from you, to save it."""


class Met(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What you came for is done, as far as you are concerned."""

    outcome: bool | float | None = None
    shared: bool = False
    """Whether the vector lies in the memory all read, or in your own."""
    number: int = 0
    """Which of the vectors that lay there this is: a host needs it once."""
    norm: float | None = None
    missing: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    release: Release | None = None
    """With the first answer of an iteration."""
    joint: Joint | None = None
    """Over a collective fabric: what is yours to do now."""
    until: int | None = None
    """After so many iterations of this run you are to save your state and end: it was stopped."""
    save_at: int | None = None
    """After so many you are to save it and go on."""
    oldest: int = 0
    """Everybody has completed so many iterations: of earlier ones, nobody needs anything."""


class RunAfterStep(msgspec.Struct, frozen=True, tag=True):
    """The weights in your memory were stepped: run what your script wants after that, and sleep on."""

    which: int
    """The optimizer that stepped."""


class Elapsed(msgspec.Struct, frozen=True, tag=True):
    """The time has passed that your gradient takes, or your nap."""

    compute_s: float


class Recalled(msgspec.Struct, frozen=True, tag=True):
    """What the optimizer remembers: tensors in the memory that comes along, and plain values."""

    slots: tuple[Slot, ...]
    values: dict[str, Any]


class Grant(msgspec.Struct, frozen=True, tag=True):
    """A batch, or (to `Linger`) leave to go on."""

    batch: Batch | None
    over: bool = False
    """There is no further work, in this epoch or a later one."""
    lead: bool = False
    """From here on you print and evaluate for all: whoever did so before is gone."""


class Given(msgspec.Struct, frozen=True, tag=True):
    """What all gave, by rank."""

    parts: dict[int, bytes]


class Halt(msgspec.Struct, frozen=True, tag=True):
    """The run is over, whatever you were about to do."""

    kind: Literal["config", "stopped", "failed"]
    text: str


FromStore = (
    Welcome
    | Ready
    | Lend
    | Added
    | Release
    | Met
    | Stand
    | Show
    | RunAfterStep
    | Elapsed
    | Grant
    | Recalled
    | Given
    | Halt
)

store_decoder: MessageDecoder[FromStore] = MessageDecoder(FromStore)
