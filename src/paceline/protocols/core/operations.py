"""Operations of peer protocols: local, joint and one-sided ones. A protocol yields them; the caller carries
them out."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from paceline.protocols.core.parts import Part
from paceline.protocols.core.topology import Topology


class Vector(Protocol):
    """One long vector of a worker: its parameters, a gradient, or a result computed from them."""

    @property
    def size_bytes(self) -> int:
        """Size in bytes when sent."""
        ...

    def clone(self) -> Vector:
        """A lasting copy."""
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
    """Forward and backward pass on the worker's next batch. Returns the gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Forward and backward pass on the same batch again, at the current parameters. Returns the gradient in
    the memory of the one from `Compute`, so clone that first. Buffers do not change. Only for protocols that
    `probes`."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of the worker's own optimizer, with this gradient."""

    gradient: Vector
    part: Part | None = None
    """Only these tensors. The others, and the optimizer's state of them, do not change."""
    rates: tuple[float, ...] = ()
    """Learning rates of the optimizer's groups, if not the current ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Preview:
    """Move the parameters like a step, without changing the optimizer's state."""

    gradient: Vector
    part: Part | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reset:
    """Clear the state of the worker's optimizer (momentum and the like)."""


@dataclass(frozen=True, slots=True, eq=False)
class Recall:
    """The state of the worker's optimizer, as vectors like the parameters, by name. Returns copies: change
    them, and `Remember` writes them back."""


@dataclass(frozen=True, slots=True, eq=False)
class Remember:
    """Write state that `Recall` returned back to the optimizer."""


@dataclass(frozen=True, slots=True, eq=False)
class Average:
    """The mean of all workers' vectors, the same on all of them. Returns it and changes nothing else."""

    vector: Vector
    group: tuple[int, ...] | None = None
    """Average among these ranks, if present. None: among all."""
    weight: float = 1.0
    """This worker's weight in the mean. If all are 0, all count equally."""
    remainder: str | None = "change"
    """The name under which a compressing run stores what it leaves out of this vector, to add it to the next.
    None: the next vector contains it anyway, as with a distance that remains until it is closed."""
    part: Part | None = None
    """Only these tensors; ignore the others in the result."""

    @property
    def size_bytes(self) -> int:
        """Size of what is averaged, in bytes."""
        return self.vector.size_bytes if self.part is None else self.part.size_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """The neighbours' vectors and the worker's own, weighted by the topology's shares. Returns the
    mixture."""

    vector: Vector
    topology: Topology
    step: int
    """Neighbours mix their vectors of the same step."""
    ahead: int | None = None
    """How many steps a worker may be ahead of the slowest; it continues when its neighbours have come. Only
    for protocols that are `apart`. None: all workers that are connected, over any number of hops, wait for
    each other."""

    @property
    def size_bytes(self) -> int:
        """Bytes of what is mixed."""
        return self.vector.size_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Agree:
    """One number or bit from each worker; returns the same result to all."""

    value: float
    how: How
    group: tuple[int, ...] | None = None


Joint = Average | Mix | Agree


@dataclass(frozen=True, slots=True)
class Handle:
    """An operation that was started."""

    lane: int
    """The number of operations the worker has started, including this one. Operations of one lane belong
    together."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Start an operation with the current vector, and continue. Returns a handle."""

    operation: Average | Mix | Exchange


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Returns the result of a started operation when it is complete. Wait for each handle once."""

    handle: Handle


@dataclass(frozen=True, slots=True, eq=False)
class Test:
    """Returns whether a started operation is complete now. Other workers may see a different answer."""

    handle: Handle


@dataclass(frozen=True, slots=True, eq=False)
class Now:
    """Returns the seconds on the run's clock. A replay returns the recorded value; in a simulation it is
    virtual time. Over a collective fabric each worker has its own clock: compare only times of one worker."""


class Rule(StrEnum):
    """What an exchange does to a cell. Rules have names, because another process carries them out."""

    GOSSIP = "gossip"
    """Both cells become their mean, then the vector is added to the worker's own cell. Returns the worker's
    own cell."""
    ELASTIC = "elastic"
    """The cell moves `rate` of the way to the vector. Returns how far it moved."""
    READ = "read"
    """Returns the cell. The vector is not sent; it only gives the kind of vector to read."""
    WRITE = "write"
    """The cell becomes the vector, even if the cell has changed since it was read. Returns nothing."""

    def travels(self, size_bytes: int) -> tuple[int, int]:
        """Bytes that travel to a cell and back for a vector of this size."""
        return (0 if self is Rule.READ else size_bytes), (0 if self is Rule.WRITE else size_bytes)


CENTRE = -1
"""The cell that belongs to no worker. Cells 0 and up belong to the ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One-sided: no other worker takes part, and no other exchange happens in between.

    A cell is a vector that the run keeps; all start as the initial parameters. Workers compute on copies, not
    on cells, because a cell that changes during a computation would silently corrupt it.
    """

    vector: Vector
    rule: Rule
    cell: int
    other: int | None = None
    """In gossip: the other worker's cell. The cell of a worker that has left is not used."""
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
    | Now
    | Exchange
)
Steps = Generator[Operation, Any, Any]
