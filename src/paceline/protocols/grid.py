"""A grid of workers: axes with names and sizes, and where each rank stands on them.

A mesh has one axis that repeats the model (`data`) and others that split it (`stage`, `model`, `sequence`,
`shard`). Ranks count through the last axis first, as torch's DeviceMesh does: with data=2,stage=4 the
ranks 0 to 3 are the four stages of the first copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from paceline.errors import ConfigError

AXES = ("data", "stage", "model", "sequence", "shard")
"""What an axis is for: `data` repeats the model, `stage` cuts it into a pipeline, `model` splits its layers,
`sequence` the samples' sequences, `shard` the tables of embeddings."""


class Grid:
    """The axes of a mesh, and one rank's place on it."""

    def __init__(self, axes: Mapping[str, int], rank: int = 0) -> None:
        self.axes = dict(axes)
        self.rank = rank

    @property
    def count(self) -> int:
        """How many workers it has."""
        return prod(self.axes.values())

    def size(self, axis: str) -> int:
        """How long an axis is; 1 for one that the mesh does not have."""
        return self.axes.get(axis, 1)

    def index(self, axis: str) -> int:
        """Where this rank stands on an axis."""
        return self.place(self.rank).get(axis, 0)

    def place(self, rank: int) -> dict[str, int]:
        """Where any rank stands, axis by axis."""
        found: dict[str, int] = {}
        for axis, size in reversed(self.axes.items()):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.axes}

    def ranks(self, axis: str) -> tuple[int, ...]:
        """The ranks of the line along an axis that this rank is on, in the axis's order."""
        mine = self.place(self.rank)
        return tuple(self.rank_at(mine | {axis: index}) for index in range(self.size(axis)))

    def rank_at(self, place: Mapping[str, int]) -> int:
        """The rank that stands there; axes that are not named are at 0."""
        rank = 0
        for axis, size in self.axes.items():
            rank = rank * size + place.get(axis, 0)
        return rank

    def name(self, rank: int) -> str:
        """A rank and its place in words: rank 5 (data 1, stage 1)."""
        places = ", ".join(f"{axis} {index}" for axis, index in self.place(rank).items())
        return f"rank {rank} ({places})" if places else f"rank {rank}"

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.axes.items())


def parse_mesh(text: str) -> dict[str, int]:
    """`data=2,stage=4`."""
    axes: dict[str, int] = {}
    for item in (part.strip() for part in text.split(",") if part.strip()):
        name, equals, size = (part.strip() for part in item.partition("="))
        if not equals or not size.isdecimal() or name in axes:
            raise ConfigError(
                f"--mesh takes each axis once with its size, as in data=2,stage=4, got {item!r} in {text!r}."
            )
        axes[name] = int(size)
    check_axes(axes)
    return axes


def check_axes(axes: Mapping[str, int]) -> None:
    """Refuse axes that nobody knows, and sizes that are none."""
    if not axes:
        raise ConfigError("a mesh needs at least one axis, such as stage=4.")
    for name, size in axes.items():
        if name not in AXES:
            raise ConfigError(f"unknown axis {name!r} of a mesh. Available: {', '.join(AXES)}.")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"axis {name} of a mesh has a size of at least 1, got {size!r}.")


def check_workers(axes: Mapping[str, int], workers: int) -> None:
    """Refuse a mesh that the workers do not fill, and say which numbers fit."""
    check_axes(axes)
    grid = Grid(axes)
    if grid.count == workers:
        return
    words = " x ".join(f"{axis}={size}" for axis, size in axes.items())
    raise ConfigError(
        f"the mesh {words} has {grid.count} places, but there are {workers} workers. "
        f"Use --workers {grid.count}{_other_sizes(axes, workers)}."
    )


def _other_sizes(axes: Mapping[str, int], workers: int) -> str:
    """The size of one axis with which the workers fill the mesh, if there is one."""
    for axis in reversed(list(axes)):
        others = prod(size for name, size in axes.items() if name != axis)
        if workers % others == 0:
            return f", or --mesh {Grid({**axes, axis: workers // others})}"
    return ""
