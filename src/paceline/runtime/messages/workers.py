"""What a worker says to the store, and (from answers.py) what it hears. Typed and small; tensors never travel
in them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from paceline.decoding import MessageDecoder
from paceline.protocols.core.meeting import Call
from paceline.protocols.core.operations import Rule
from paceline.runtime.checkpoints.worker_state import WorkerState
from paceline.runtime.messages.answers import Added as Added
from paceline.runtime.messages.answers import Elapsed as Elapsed
from paceline.runtime.messages.answers import FromStore as FromStore
from paceline.runtime.messages.answers import Given as Given
from paceline.runtime.messages.answers import Grant as Grant
from paceline.runtime.messages.answers import Halt as Halt
from paceline.runtime.messages.answers import Joint as Joint
from paceline.runtime.messages.answers import Lend as Lend
from paceline.runtime.messages.answers import Met as Met
from paceline.runtime.messages.answers import Ready as Ready
from paceline.runtime.messages.answers import Recalled as Recalled
from paceline.runtime.messages.answers import Release as Release
from paceline.runtime.messages.answers import RunAfterStep as RunAfterStep
from paceline.runtime.messages.answers import Show as Show
from paceline.runtime.messages.answers import Stand as Stand
from paceline.runtime.messages.answers import Welcome as Welcome
from paceline.runtime.messages.answers import store_decoder as store_decoder
from paceline.store.layout import Layout, Slot
from paceline.store.optimizers import GroupSettings, OptimizerSpec
from paceline.store.work.budget import Batch, Source
from paceline.store.work.due import LoaderPasses


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
    trigger: float | None = None
    """From which share of the usual norm on gradients are pushed, if the script says so."""


class Register(msgspec.Struct, frozen=True, tag=True):
    """The worker's model. Rank 0 sends the memory with its initial values along, or who is asked to."""

    layout: Layout
    optimizer: OptimizerSpec
    source: Source | None
    peer: bool = False
    """Whether it is a peer, which keeps its optimizer; it describes that if the run may step in its place."""
    after_step: tuple[int, ...] = ()
    """The optimizers after whose steps my script has something run on the weights."""


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
    weigh: int | None = None
    """The samples it counts by in a mean, if these are not the ones to be counted."""
    clip: float | None = None
    """The largest norm that the step with my gradient may have, as the script asked."""
    spent: bool = False
    """Whether the gradient is of no use to me afterwards: a mean may take its place."""
    state: WorkerState | None = None
    """Where I stand, if I was to tell."""
    withheld: int = 0
    """How many more calls of `optimizer.step()` its gradient is the sum of, which were not pushed then."""
    forced: bool = False
    """Whether it is pushed though it has not come to the share that triggers."""
    rates: tuple[float, ...] = ()
    """The learning rates I step with, where replicas that step by themselves are to stay equal."""


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
    lane: int = 0
    """0: its worker sleeps meanwhile. Above, it goes on, and this counts what it has started."""


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


def _moves(call: Call | None) -> bool:
    """Whether peers bring vectors to it, and get one: a vote is none."""
    return call is not None and call.kind != "agree"


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
    clock: bool = False
    """Whether it only wants to know the time."""
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
    stands: bool = False
    """Whether it has completed an iteration, and nothing else is to be said; not answered."""
    stood: int = 0
    """Where that lies what it was after as many iterations as its stage says."""
    saved: str | None = None
    """That it has saved its state, and waits until all have: empty, or why it could not."""
    packed: int = 0
    """Bytes of the compressed vector that lies in its place instead; 0: it lies there as it is."""

    @property
    def lane(self) -> int:
        """That of what it comes to."""
        came = self.call or self.trade
        return 0 if came is None else came.lane

    @property
    def brings(self) -> bool:
        """Whether a vector comes along."""
        return _moves(self.call) or (self.trade is not None and self.trade.rule is not Rule.READ)

    @property
    def gets(self) -> bool:
        """Whether a vector is answered."""
        return _moves(self.call) or (self.trade is not None and self.trade.rule is not Rule.WRITE)

    @property
    def goes_on(self) -> bool:
        """Whether the worker does not sleep: it has started something, or is not answered."""
        return self.retires or self.stands or self.lane > 0


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
    passes: LoaderPasses | None = None
    """Over my prepared loader; None: I had none."""


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


class RecallOptimizer(msgspec.Struct, frozen=True, tag="Recall"):
    """What does the optimizer remember that steps for all?"""

    weights: bool = False
    """Whether to show the weights as well, as they are at the same moment."""
    own: bool = False
    """Whether I mean my own optimizer, as the checkpoint has it that the run goes on from."""


class Restore(msgspec.Struct, frozen=True, tag=True):
    """The optimizer that steps for all is to remember this; the memory comes along. Not answered."""

    slots: tuple[Slot, ...]
    values: dict[str, Any]
    own: bool = False
    """Whether it is my own optimizer that remembers this: the next checkpoint is to have it."""
    ahead: bool = False
    """Whether it does so after the step that I push next."""


class AfterStepRan(msgspec.Struct, frozen=True, tag=True):
    """I have run what the script wants after a step, on the weights that were in my memory. I sleep on."""


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
    | RecallOptimizer
    | Restore
    | AfterStepRan
    | Say
)

UNANSWERED = (Leave, Failed, Say, PlanEpochs, Enough, Restore)
"""After these a worker goes on at once."""


worker_decoder: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
