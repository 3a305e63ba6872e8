"""What a peer protocol is: one worker's iteration, told as operations that somebody else carries out.

There is no store in the middle. Every worker has a model of its own (its *replica*) and its own
optimizer, and what the workers do together they say by name: `gradient = yield Compute()`, `mean =
yield Average(gradient)`. The protocol moves no bytes and reads no clock, so that real workers, the
tests' driver and the simulator run the very same object.

One generator is one iteration, with exactly one `Compute` in it. What has to outlive it is kept in
`me.agreed` (the same on every worker, handed to a joiner) or `me.private`, never in the frame.

A vector that an operation answers is good until the next operation that communicates, or the end
of the iteration: keep a clone of what has to last.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

from paceline.errors import RunError
from paceline.protocols.parts import NO_TENSORS, Part, Tensors
from paceline.protocols.topology import Topology


class Vector(Protocol):
    """All of one kind that a worker has, as one long vector: parameters, a gradient, what is made of them."""

    @property
    def size_bytes(self) -> int:
        """Bytes it takes to send it."""
        ...

    def clone(self) -> Vector:
        """A copy that lasts."""
        ...

    def dot(self, other: Any) -> float:
        """The scalar product."""
        ...

    def __setitem__(self, every: slice, other: Any) -> None: ...
    def __add__(self, other: Any) -> Vector: ...
    def __sub__(self, other: Any) -> Vector: ...
    def __mul__(self, factor: float) -> Vector: ...
    def __rmul__(self, factor: float) -> Vector: ...


class How(StrEnum):
    """How the workers' answers become one."""

    ANY = "any"
    """True if anyone's is."""
    ALL = "all"
    """True if everyone's is."""
    SUM = "sum"
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Forward and backward on the worker's next batch. Answers the gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Forward and backward on the same batch once more, at the parameters as they are now. Answers the
    gradient, where that of `Compute` lay: keep a clone of that one. Buffers stay. For who `probes` only."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of the worker's own optimizer, with this gradient."""

    gradient: Vector
    part: Part | None = None
    """These tensors only: the others, and what the optimizer remembers of them, stay as they are."""
    rates: tuple[float, ...] = ()
    """The learning rates of its groups, if not those of now."""


@dataclass(frozen=True, slots=True, eq=False)
class Preview:
    """Move the parameters as a step would, and let the optimizer remember nothing of it."""

    gradient: Vector
    part: Part | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reset:
    """Let the worker's optimizer forget its momentum and the like."""


@dataclass(frozen=True, slots=True, eq=False)
class Recall:
    """What the worker's optimizer remembers, as vectors like the parameters, by name. Answers copies of it:
    write to them, and `Remember` lets the optimizer have them."""


@dataclass(frozen=True, slots=True, eq=False)
class Remember:
    """Let the optimizer have what was made of what it remembered."""


@dataclass(frozen=True, slots=True, eq=False)
class Average:
    """The mean of everybody's vector, the same for all of them. Answers it; changes nothing else."""

    vector: Vector
    group: tuple[int, ...] | None = None
    """Among these ranks, as far as they are there; None: among all."""
    weight: float = 1.0
    """This worker's part in the mean; if all are 0, all count the same."""
    remainder: str | None = "change"
    """The name under which a run that compresses keeps what it leaves out of this vector, to add it to the
    next. None: that is part of the next one anyway, as with a distance that lasts until it is closed."""
    part: Part | None = None
    """These tensors only; of the answer, the others mean nothing."""

    @property
    def size_bytes(self) -> int:
        """Bytes of what is averaged."""
        return self.vector.size_bytes if self.part is None else self.part.size_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """The neighbours' vectors and one's own, in the topology's shares. Answers the mixture."""

    vector: Vector
    topology: Topology
    step: int
    """Neighbours mix what they have at the same step."""

    @property
    def size_bytes(self) -> int:
        """Bytes of what is mixed."""
        return self.vector.size_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Agree:
    """One number or bit from each; answers the same to all."""

    value: float
    how: How
    group: tuple[int, ...] | None = None


Joint = Average | Mix | Agree


@dataclass(frozen=True, slots=True)
class Handle:
    """An operation that was started."""

    lane: int
    """How many a worker had started, this one counted: those of one lane belong together."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Begin a joint operation with the vector as it is now, and go on. Answers a handle."""

    operation: Average | Mix


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Answers what a started operation does, as soon as it is complete. Each handle is waited for once."""

    handle: Handle


@dataclass(frozen=True, slots=True, eq=False)
class Test:
    """Answers whether a started operation is complete, here and now: others may see it otherwise."""

    handle: Handle


class Rule(StrEnum):
    """What an exchange does to a cell. The rules have names, since it has to be carried out elsewhere."""

    GOSSIP = "gossip"
    """Both cells become their mean, then the vector is added to one's own. Answers one's own."""
    ELASTIC = "elastic"
    """The cell goes `rate` of its way to the vector. Answers how far it went."""


CENTRE = -1
"""The cell that belongs to nobody; those from 0 on belong to the ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One-sided: nobody has to come, and nobody else's exchange comes in between.

    A cell is a vector that the run keeps; all begin as the initial parameters. Workers do not compute on
    cells but on copies: what changes under a computation corrupts it without a word.
    """

    vector: Vector
    rule: Rule
    cell: int
    other: int | None = None
    """In gossip: the other's cell. One that is no longer there is left alone."""
    rate: float = 1.0


Operation = (
    Compute
    | Probe
    | Step
    | Preview
    | Reset
    | Recall
    | Remember
    | Average
    | Mix
    | Agree
    | Start
    | Wait
    | Test
    | Exchange
)
Steps = Generator[Operation, Any, Any]


@dataclass(slots=True)
class Me:
    """One worker, as its protocol sees it."""

    rank: int
    size: int
    """How many workers the run was started with."""
    seed: int
    parameters: Vector
    """What this worker trains. It changes by `Step`, and by writing to it: `me.parameters[:] = mean`."""
    buffers: Vector
    """The model's float buffers (BatchNorm's statistics and the like); often empty."""
    keep: Callable[[Vector], Vector] = field(default=lambda vector: vector.clone())
    """A copy that lasts, where the run can see it: for what `model` gives instead of the parameters."""
    members: tuple[int, ...] = ()
    """Who takes part, as far as this worker was told."""
    count: int = 0
    """Iterations this worker has completed."""
    samples: int = 0
    """Samples behind the gradient it computed last."""
    rates: tuple[float, ...] = ()
    """Learning rates of its optimizer's groups, when it computed that one."""
    loss: float | None = None
    """What its script reported under this name since the one before, if it did."""
    told: dict[str, float] = field(default_factory=dict)
    """Figures for the record; they stand there with the next iteration."""
    tensors: Tensors = field(default_factory=lambda: NO_TENSORS)
    """What the parameters consist of."""
    agreed: SimpleNamespace = field(default_factory=SimpleNamespace)
    """Memory that is the same on every worker."""
    private: SimpleNamespace = field(default_factory=SimpleNamespace)
    """Memory of this worker alone."""


class Peer:
    """A peer protocol. Its dataclass fields are its settings, each with its docstring below."""

    __slots__ = ()

    agrees: ClassVar[bool] = False
    """True when what stands for the workers is equal after every iteration: any of it is the model."""
    sends_ahead: ClassVar[bool] = False
    """True when vectors are under way between iterations, until `settle` brings them to an end."""
    overlaps: ClassVar[bool] = False
    """True when its first joint operation averages the gradient over all, weighted by samples, so that a
    fabric may begin with it while backward goes on."""
    in_unison: ClassVar[bool] = False
    """True when an iteration is no more than to average the gradient over all, by samples, and to step with
    that: then one model, stepped once, will do for all where memory is shared."""

    @property
    def free(self) -> bool:
        """Whether nobody waits for anybody, so that a fast worker does more of the work."""
        return False

    @property
    def repeats(self) -> bool:
        """Whether the same seed gives the same bits, however fast who is."""
        return True

    @property
    def plain_alone(self) -> bool:
        """Whether a lone worker under this protocol does what plain PyTorch does."""
        return True

    @property
    def resumable(self) -> bool:
        """Whether all do equally many iterations, so that a run can be stopped and go on between two."""
        return not self.free

    @property
    def probes(self) -> bool:
        """Whether it computes on a batch more than once."""
        return False

    @property
    def in_parts(self) -> bool:
        """Whether some tensors of a vector are averaged now, and others later."""
        return False

    def check(self, workers: int) -> None:
        """Refuse a number of workers that cannot work, with the reason."""

    def start(self, me: Me) -> None:
        """Before the first iteration; all replicas are equal."""

    def iteration(self, me: Me) -> Steps:
        """One iteration of one worker."""
        raise NotImplementedError

    def settle(self, me: Me) -> Steps:
        """After the last iteration: bring to an end what is under way, together with all others."""
        yield from ()

    def model(self, me: Me) -> Vector:
        """What stands for this worker when the run is evaluated and saved: the mean over all is taken."""
        return me.parameters

    def stage(self, me: Me) -> int:
        """How far this worker's model has come: where all are to be equal, one of the furthest counts."""
        return me.count

    def cell(self, me: Me) -> int | None:
        """The cell that stands for this worker, if it is not a vector of its own."""
        return None


class Done:
    """An iteration is complete."""


def settles(protocol: Peer) -> bool:
    """Whether there is something to bring to an end."""
    return type(protocol).settle is not Peer.settle


def life(
    protocol: Peer, me: Me, resume: Callable[[], None] = lambda: None
) -> Generator[Operation | Done, Any, None]:
    """All iterations of one worker, one after another, with a `Done` after each.

    `resume` puts back what a checkpoint remembers, where there is one.
    """
    protocol.start(me)
    resume()
    while True:
        yield from _one(protocol, me)
        me.count += 1
        yield Done()


def average_model(me: Me, group: tuple[int, ...] | None = None) -> Steps:
    """Let parameters and float buffers be those of all, or of a group, in the mean."""
    me.parameters[:] = yield Average(me.parameters, group)
    yield from average_buffers(me, group)


def average_buffers(me: Me, group: tuple[int, ...] | None = None, weight: float = 1.0) -> Steps:
    """The same for float buffers alone, if there are any."""
    if me.buffers.size_bytes:
        me.buffers[:] = yield Average(me.buffers, group, weight)


def average_optimizer(me: Me) -> Steps:
    """Let what the optimizer remembers be that of all in the mean."""
    for name, vector in sorted((yield Recall()).items()):
        vector[:] = yield Average(vector, remainder=f"optimizer {name}")
    yield Remember()


def _one(protocol: Peer, me: Me) -> Steps:
    """One iteration, held to exactly one `Compute`."""
    steps, answer, computed = protocol.iteration(me), None, 0
    while computed <= 1:
        try:
            operation = steps.send(answer)
        except StopIteration:
            break
        computed += isinstance(operation, Compute)
        if computed <= 1:
            answer = yield operation
    if computed != 1:
        name, times = type(protocol).__name__, "twice or more" if computed else "never"
        raise RunError(
            f"{name}.iteration() computed {times} in iteration {me.count + 1}. Yield exactly one Compute()."
        )
