"""What peers do: alone, together, one-sidedly. An operation says what; somebody else carries it out."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from paceline.protocols.core.parts import Part
from paceline.protocols.core.topology import Topology


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
    ahead: int | None = None
    """How many steps one may be ahead of the slowest: it is answered when its neighbours have come. For
    who is `apart` only. None: all who are connected, over any number of hops, wait for each other."""

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
    """Begin an operation with the vector as it is now, and go on. Answers a handle."""

    operation: Average | Mix | Exchange


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Answers what a started operation does, as soon as it is complete. Each handle is waited for once."""

    handle: Handle


@dataclass(frozen=True, slots=True, eq=False)
class Test:
    """Answers whether a started operation is complete, here and now: others may see it otherwise."""

    handle: Handle


@dataclass(frozen=True, slots=True, eq=False)
class Now:
    """Answers the seconds on the run's clock. A replay answers what was answered then, and in a simulation it
    is the virtual time. Over a collective fabric each worker has its own: compare one's only."""


class Rule(StrEnum):
    """What an exchange does to a cell. The rules have names, since it has to be carried out elsewhere."""

    GOSSIP = "gossip"
    """Both cells become their mean, then the vector is added to one's own. Answers one's own."""
    ELASTIC = "elastic"
    """The cell goes `rate` of its way to the vector. Answers how far it went."""
    READ = "read"
    """Answers the cell. The vector stays at home: it only says what kind of vector is read."""
    WRITE = "write"
    """The cell becomes the vector, whatever it has become since it was read. Nothing comes back."""

    def travels(self, size_bytes: int) -> tuple[int, int]:
        """Bytes that travel to a cell, and back, when the vector has so many."""
        return (0 if self is Rule.READ else size_bytes), (0 if self is Rule.WRITE else size_bytes)


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
    | Now
    | Exchange
)
Steps = Generator[Operation, Any, Any]
