"""What a peer protocol is: one worker's iteration, written as operations that the caller carries out.

There is no store. Every worker has its own model (its *replica*) and its own optimizer, and names what
the workers do together: `gradient = yield Compute()`, `mean = yield Average(gradient)`. The protocol
moves no bytes and reads no clock, so that real workers, the tests' driver and the simulator run the very
same object.

One generator is one iteration, with exactly one `Compute` in it. Keep what must outlive it in `me.agreed`
(the same on every worker, passed to a worker that joins) or `me.private`, never in local variables. A vector
that an operation returns is valid until the next operation that communicates, or until the end of the
iteration: clone what must last longer.
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
    """The trained parameters of this worker. `Step` changes them, and so does writing to them:
    `me.parameters[:] = mean`."""
    buffers: Vector
    """The model's float buffers (BatchNorm's statistics and the like); often empty."""
    keep: Callable[[Vector], Vector] = field(default=lambda vector: vector.clone())
    """Makes a lasting copy that the run can read. For vectors that `model` returns instead of the
    parameters."""
    members: tuple[int, ...] = ()
    """The workers that take part, as far as this worker knows."""
    count: int = 0
    """Iterations this worker has completed."""
    samples: int = 0
    """Samples behind the gradient it computed last."""
    rates: tuple[float, ...] = ()
    """Learning rates of its optimizer's groups when it computed that gradient."""
    loss: float | None = None
    """The loss that its script reported since the last iteration, if any."""
    told: dict[str, float] = field(default_factory=dict)
    """Figures for the trace; they are written with the next iteration."""
    tensors: Tensors = field(default_factory=lambda: NO_TENSORS)
    """The tensors that make up the parameters."""
    agreed: SimpleNamespace = field(default_factory=SimpleNamespace)
    """State that is the same on every worker."""
    private: SimpleNamespace = field(default_factory=SimpleNamespace)
    """State of this worker alone."""
    after_step: Callable[[Vector], None] = field(default=lambda vector: None)
    """The script's functions that run after a step (`pace.after_step`). For an outer step on weights other
    than the parameters."""


class Peer:
    """A peer protocol. Its dataclass fields are its settings, each with its docstring below."""

    __slots__ = ()

    agrees: ClassVar[bool] = False
    """True if all workers' models are equal after every iteration, so any of them is the result."""
    overlaps: ClassVar[bool] = False
    """True if its first joint operation averages the gradient over all workers, weighted by samples, so that
    a fabric may start it during the backward pass."""
    in_unison: ClassVar[bool] = False
    """True if an iteration only averages the gradient over all workers, by samples, and steps with it. With
    shared memory one model, stepped once, then serves all workers."""

    @property
    def sends_ahead(self) -> bool:
        """Whether vectors are under way between iterations, until `settle` completes them."""
        return False

    @property
    def settles(self) -> bool:
        """Whether there is something to complete after the last iteration."""
        return type(self).settle is not Peer.settle

    @property
    def level(self) -> bool:
        """Whether every gradient goes into a mean of all workers, by samples. Then a worker without work in
        the last round of an epoch can take part with a gradient of weight 0, and epochs end together."""
        return self.in_unison

    @property
    def free(self) -> bool:
        """Whether no worker waits for another, so that a fast worker does more of the work."""
        return False

    @property
    def adds_moves(self) -> bool:
        """Whether workers' displacements are added to a model that no worker has, so no worker can run
        functions on the sum."""
        return False

    @property
    def apart(self) -> bool:
        """Whether workers that wait for each other may be at different iterations. Each then keeps its models
        of the iterations that not all workers have reached, so that the run can be evaluated."""
        return False

    @property
    def copies(self) -> int:
        """How many copies of its model each worker may have to keep at once, for slower workers and for
        vectors under way. Their memory is reserved at the start of a run."""
        return 0

    @property
    def repeats(self) -> bool:
        """Whether the same seed gives the same bits, however fast the workers are."""
        return True

    @property
    def plain_alone(self) -> bool:
        """Whether one worker alone trains exactly as plain PyTorch under this protocol."""
        return True

    @property
    def resumable(self) -> bool:
        """Whether all workers make equally many iterations, so that a run can be stopped and resumed between
        two."""
        return not self.free

    @property
    def probes(self) -> bool:
        """Whether it computes on a batch more than once."""
        return False

    @property
    def in_parts(self) -> bool:
        """Whether some tensors of a vector are averaged at once and others later."""
        return False

    @property
    def in_groups(self) -> bool:
        """Whether changes are also averaged in groups of workers."""
        return False

    def check(self, workers: int) -> None:
        """Refuse an impossible number of workers, with the reason."""

    def check_optimizer(self, name: str, momentum: float) -> None:
        """Refuse an unsuitable optimizer, with the reason."""

    def caution(self, momentum: float) -> str:
        """A warning at the start of a run about training with this momentum; usually empty."""
        return ""

    def start(self, me: Me) -> None:
        """Before the first iteration; all replicas are equal."""

    def iteration(self, me: Me) -> Steps:
        """One iteration of one worker."""
        raise NotImplementedError

    def settle(self, me: Me) -> Steps:
        """After the last iteration: complete what is under way, together with all other workers."""
        yield from ()

    def model(self, me: Me) -> Vector:
        """This worker's model for evaluating and saving the run, which use the mean over all workers."""
        return me.parameters

    def stage(self, me: Me) -> int:
        """How far this worker's model has come. If all should be equal, one of the furthest is used."""
        return me.count

    def cell(self, me: Me) -> int | None:
        """The cell that holds this worker's model, if the worker does not hold it itself."""
        return None

    def remarks(self, workers: int) -> list[str]:
        """Remarks for the user about a run with this number of workers; usually empty."""
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
    """Set parameters and float buffers to their mean over all workers, or over a group."""
    me.parameters[:] = yield Average(me.parameters, group)
    yield from average_buffers(me, group)


def average_buffers(me: Me, group: tuple[int, ...] | None = None, weight: float = 1.0) -> Steps:
    """The same for float buffers alone, if there are any."""
    if me.buffers.size_bytes:
        me.buffers[:] = yield Average(me.buffers, group, weight)


def average_optimizer(me: Me) -> Steps:
    """Set the optimizer's state to its mean over all workers."""
    for name, vector in sorted((yield Recall()).items()):
        vector[:] = yield Average(vector, remainder=f"optimizer {name}")
    yield Remember()


def _one(protocol: Peer, me: Me) -> Steps:
    """One iteration. Checks that it has exactly one `Compute`."""
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
