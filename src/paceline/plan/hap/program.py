"""A distributed program: instructions in order, what each costs, and where parameters live."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["compute", "all_gather", "slice", "reduce_scatter", "all_reduce", "all_to_all", "finish"]


class Instruction(msgspec.Struct, frozen=True, kw_only=True):
    """One step that all devices take."""

    kind: Kind
    tensor: str
    """What is computed or moved."""
    before: tuple[str, ...] = ()
    """The inputs' properties, or the one that the tensor has had."""
    after: str = ""
    variant: str = ""
    flops: float = 0.0
    shared: bool = False
    segment: int = 0
    compute_s: float = 0.0
    comm_s: float = 0.0
    fixed_s: float = 0.0
    """Of the communication, what does not depend on the ratios."""
    longest_s: float = 0.0
    """Of the communication, what goes with the largest ratio."""
    parameters: tuple[str, ...] = ()
    """Those that are used here for the first time."""

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.compute_s + self.comm_s


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What the search finds."""

    instructions: tuple[Instruction, ...]
    placements: dict[str, str]
    """Of parameters: I, or G and the dimension that is cut."""

    @property
    def seconds(self) -> float:
        """Of one step, without overlap."""
        return sum(each.seconds for each in self.instructions)
