"""Which dimension to cut at every stage of a model, so that it is switched as rarely as possible.

A stage is computed locally while a dimension is cut that it does not attend over. Keeping what is cut as long
as that is allowed, and then taking the dimension that stays allowed for longest, needs the fewest switches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.errors import ConfigError


def layouts(attended: Sequence[Collection[int]], dims: Sequence[int], first: int | None = None) -> list[int]:
    """For every stage the dimension that is cut, given those that it attends over. `first`: cut already."""
    chosen: list[int] = []
    current = first
    for at, needed in enumerate(attended):
        if current is None or current in needed:
            current = _longest(attended[at:], dims)
            if current in needed:
                raise ConfigError(
                    f"stage {at} attends over all of the dimensions {list(dims)}: none is left to cut. "
                    "Gather before it, or use Ulysses or ring attention there."
                )
        chosen.append(current)
    return chosen


def _longest(attended: Sequence[Collection[int]], dims: Sequence[int]) -> int:
    def lasts(dim: int) -> int:
        return next((at for at, needed in enumerate(attended) if dim in needed), len(attended))

    return max(dims, key=lasts)
