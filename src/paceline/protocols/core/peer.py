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
from types import SimpleNamespace
from typing import Any, ClassVar

from paceline.errors import RunError
from paceline.protocols.core.operations import (
    Average,
    Compute,
    Operation,
    Recall,
    Remember,
    Steps,
    Vector,
)
from paceline.protocols.core.parts import NO_TENSORS, Tensors


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
    after_step: Callable[[Vector], None] = field(default=lambda vector: None)
    """What the script has run on weights after a step (`pace.after_step`): for an outer step on other weights
    than the parameters."""


class Peer:
    """A peer protocol. Its dataclass fields are its settings, each with its docstring below."""

    __slots__ = ()

    agrees: ClassVar[bool] = False
    """True when what stands for the workers is equal after every iteration: any of it is the model."""
    overlaps: ClassVar[bool] = False
    """True when its first joint operation averages the gradient over all, weighted by samples, so that a
    fabric may begin with it while backward goes on."""
    in_unison: ClassVar[bool] = False
    """True when an iteration is no more than to average the gradient over all, by samples, and to step with
    that: then one model, stepped once, will do for all where memory is shared."""

    @property
    def sends_ahead(self) -> bool:
        """Whether vectors are under way between iterations, until `settle` brings them to an end."""
        return False

    @property
    def settles(self) -> bool:
        """Whether there is something to bring to an end after the last iteration."""
        return type(self).settle is not Peer.settle

    @property
    def level(self) -> bool:
        """Whether every gradient goes into a mean of all, by samples: then a worker without work in the last
        round of an epoch can take part with a gradient that counts for nothing, and epochs end together."""
        return self.in_unison

    @property
    def free(self) -> bool:
        """Whether nobody waits for anybody, so that a fast worker does more of the work."""
        return False

    @property
    def adds_moves(self) -> bool:
        """Whether what a worker moved by is added to a model that no worker has, so that nobody could run
        anything on the sum."""
        return False

    @property
    def apart(self) -> bool:
        """Whether workers that wait for each other may be at different iterations: then each keeps what it
        was after those that not all have come to, so that the run can be evaluated."""
        return False

    @property
    def copies(self) -> int:
        """How many copies of its model each worker may have to keep at once for those who are behind it, and
        for what is under way: room for them is asked for when a run begins."""
        return 0

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

    @property
    def in_groups(self) -> bool:
        """Whether changes are averaged in groups of workers, too."""
        return False

    def check(self, workers: int) -> None:
        """Refuse a number of workers that cannot work, with the reason."""

    def check_optimizer(self, name: str, momentum: float) -> None:
        """Refuse an optimizer that cannot work, with the reason."""

    def caution(self, momentum: float) -> str:
        """What somebody who trains with this momentum is told at the start of a run; usually nothing."""
        return ""

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

    def remarks(self, workers: int) -> list[str]:
        """What somebody who starts it with so many workers should know; usually nothing."""
        return []


class Done:
    """An iteration is complete."""


def life(
    protocol: Peer, me: Me, resume: Callable[[], None] = lambda: None
) -> Generator[Operation | Done, Any, None]:
    """All iterations of one worker, one after another, with a `Done` after each.

    `resume` puts back what a checkpoint remembers, where there is one.
    """
    protocol.start(me)
    resume()
    yield from iterations(protocol, me)


def iterations(protocol: Peer, me: Me) -> Generator[Operation | Done, Any, None]:
    """The same, after the start."""
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
