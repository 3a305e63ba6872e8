"""What a worker and the store say to each other. Typed and small; tensors never travel in them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from paceline.config import RunConfig
from paceline.protocols.core.meeting import Call
from paceline.protocols.core.operations import Rule
from paceline.protocols.core.parts import Part
from paceline.protocols.paced.psp_distributed import PeerBarrier
from paceline.runtime.checkpoints.worker_state import WorkerState
from paceline.store.layout import Layout, Slot
from paceline.store.optimizers import GroupSettings, OptimizerSpec
from paceline.store.work.budget import Batch, Source


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First word of a worker, with what its script names in `join`."""

    pid: int
    protocol: str | None
    settings: dict[str, Any]
    rank: int | None = None
    """The rank it was started as, if it knows; who has the store as a neighbour is told."""
    sha256: str = ""
    """Of the file in which the protocol stands that its script names, if it is one of the user's own."""
    correct: str | None = None
    """How stale gradients are to be corrected, if the script says so."""


class Register(msgspec.Struct, frozen=True, tag=True):
    """The worker's model. Rank 0 sends the memory with its initial values along, or who is asked to."""

    layout: Layout
    optimizer: OptimizerSpec
    source: Source | None
    peer: bool = False
    """Whether it is a peer, which keeps its optimizer; it describes that if the run may step in its place."""


class Push(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The gradient in my segment is complete. I sleep until I am released."""

    compute_s: float
    samples: int
    used: tuple[Batch, ...] = ()
    """Batches behind this gradient."""
    settings: list[GroupSettings] | None = None
    """The optimizer's group settings, when they changed."""
    missing: tuple[int, ...] = ()
    values: dict[str, float] | None = None
    """What the script reported since the last push."""
    want: bool = False
    """Whether to grant the next batch along with the release."""
    finite: bool = False
    """Whether I have looked, and found the gradient finite; if not, the store looks."""
    scaled: bool = False
    """Whether a GradScaler looks after my steps: one that is not finite is skipped."""
    which: int = 0
    """Of several optimizers, the one that steps."""
    again: bool = False
    """Whether my samples were counted with another optimizer's step."""
    weigh: int = 0
    """The samples it counts by in a mean, if these are not the ones to be counted."""
    clip: float | None = None
    """The largest norm that the step with my gradient may have, as the script asked."""
    spent: bool = False
    """Whether the gradient is of no use to me afterwards: a mean may take its place."""
    state: WorkerState | None = None
    """Where I stand, if I was to tell."""


class BarrierPassed(msgspec.Struct, frozen=True, tag="Passed"):
    """I keep a barrier of my own and have passed it: give me fresh weights, I go on."""

    looks: int
    """How often I looked at others for that."""
    asked: int
    """How many clocks I asked for."""


class Nap(msgspec.Struct, frozen=True, tag=True):
    """Under a virtual clock: I did not pass, and sleep until it is time to look again."""

    seconds: float


class Draw(msgspec.Struct, frozen=True, tag=True):
    """I need a batch."""


class Linger(msgspec.Struct, frozen=True, tag=True):
    """I see the end of this epoch: may I go on, or is there work left by somebody who died?"""

    epoch: int


class Away(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """I evaluate; do not wait for me."""

    distance: bool = False
    """Whether I only want to know how far apart the replicas of peers are."""


class Back(msgspec.Struct, frozen=True, tag=True):
    """I have evaluated."""

    values: dict[str, float]
    seconds: float


class Trade(msgspec.Struct, frozen=True):
    """A one-sided exchange with a cell."""

    rule: Rule
    cell: int
    other: int | None
    rate: float


class Carried(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker has to say that exchanges vectors with the others itself."""

    bucketed: bool = False
    """The gradient's average has begun already, bucket by bucket, over all."""
    changed: bool = False
    """The gradient is another one than what was sent off in buckets."""
    void: bool = False
    """Whether the gradient was not finite and is left out, or nothing can be told: use what is sent now."""
    rests: bool = False
    """It has nothing more to do, and waits for the others to come to their end."""
    mean: bool = False
    """The mean of all models lies in the memory that comes along; not answered."""
    torn: str = ""
    """An exchange broke off, so somebody must be lost: why, as this worker sees it."""


class Meet(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A peer has come to a joint operation, or to the end of an iteration without one, and sleeps.

    Descriptors that come along are memory it lends, in the order of its places.
    """

    call: Call | None = None
    place: int = 0
    """Which of its memories holds the vector it brings."""
    into: int = 0
    """Where the answer to a started operation is to go."""
    wait: int = 0
    """The lane of a started operation that it waits for."""
    test: bool = False
    """Whether it only wants to know if that one is complete."""
    retires: bool = False
    """Whether it has done its last iteration; not answered."""
    trade: Trade | None = None
    missing: tuple[int, ...] = ()
    push: Push | None = None
    """What is to be put on record, with the first word of an iteration."""
    model: int = 0
    """Which of its memories holds what stands for it when the run is evaluated."""
    cell: int | None = None
    """The cell that does so instead."""
    carried: Carried | None = None
    """Over a collective fabric: what else is to be known."""
    stage: int = 0
    """How far that model has come."""
    saved: str | None = None
    """That it has saved its state, and waits until all have: empty, or why it could not."""
    packed: int = 0
    """Bytes of the compressed vector that lies in its place instead; 0: it lies there as it is."""


class Computed(msgspec.Struct, frozen=True, tag=True):
    """A peer under a virtual clock has a gradient, and sleeps until the time it takes has passed."""

    batches: float = 1.0
    """Of the loader's size, behind the gradient."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """I am done."""

    values: dict[str, float] | None = None
    waits: bool = False
    """Whether I sleep until the run is over, for the model that it saves."""
    state: WorkerState | None = None
    """Where I stood when the run was stopped."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """My script raised."""

    kind: Literal["config", "error", "fatal"]
    """`fatal`: nobody is to go on without me."""
    text: str


class Give(msgspec.Struct, frozen=True, tag=True):
    """These bytes are for everybody. I take no part until I have those of all."""

    data: bytes
    more: bool
    """Whether more is to follow, for which I will come again at once."""


class PlanEpochs(msgspec.Struct, frozen=True, tag="Plan"):
    """How many epochs my script means to run."""

    epochs: int


class Enough(msgspec.Struct, frozen=True, tag=True):
    """Training is over for all: nobody is to get further work."""

    why: str


class Recall(msgspec.Struct, frozen=True, tag=True):
    """What does the optimizer remember that steps for all?"""

    weights: bool = False
    """Whether to show the weights as well, as they are at the same moment."""


class Restore(msgspec.Struct, frozen=True, tag=True):
    """The optimizer that steps for all is to remember this; the memory comes along. Not answered."""

    slots: tuple[Slot, ...]
    values: dict[str, Any]


class Say(msgspec.Struct, frozen=True, tag=True):
    """Something for the record."""

    level: Literal["info", "warning"]
    text: str


FromWorker = (
    Hello
    | Register
    | Push
    | BarrierPassed
    | Nap
    | Draw
    | Linger
    | Away
    | Back
    | Meet
    | Computed
    | Leave
    | Failed
    | Give
    | PlanEpochs
    | Enough
    | Recall
    | Restore
    | Say
)

UNANSWERED = (Leave, Failed, Say, PlanEpochs, Enough, Restore)
"""After these a worker goes on at once."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The run the worker takes part in."""

    config: RunConfig
    rank: int


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
    """Where you decide yourself when to go on; the last descriptor is the board of all clocks."""
    ahead: bool = False
    """Whether you compute on a look-ahead, and not on the store's own weights."""
    rounds: int | None = None
    """How many batches you get per epoch: in lockstep exactly, else on average."""
    state: WorkerState | None = None
    """Where you stood when the run was stopped that goes on now."""
    tell: bool = False
    """With your first push, tell where you stand."""


class Lend(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 was lost before it could tell: register again, and send your initial values along."""


class Added(msgspec.Struct, frozen=True, tag=True):
    """Your gradient is in the weights. When you go on is your own business."""


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


class Given(msgspec.Struct, frozen=True, tag=True):
    """What all gave, by rank."""

    parts: dict[int, bytes]


class Halt(msgspec.Struct, frozen=True, tag=True):
    """The run is over, whatever you were about to do."""

    kind: Literal["config", "stopped", "failed"]
    text: str


FromStore = (
    Welcome | Ready | Lend | Added | Release | Met | Stand | Show | Elapsed | Grant | Recalled | Given | Halt
)

worker_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
store_decoder: msgspec.msgpack.Decoder[FromStore] = msgspec.msgpack.Decoder(FromStore)
