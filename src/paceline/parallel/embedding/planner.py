"""Which worker of a group keeps which part of which embedding table: a greedy plan under a memory budget.

Paper: Zhang et al., "Two-dimensional Sparse Parallelism for Large Scale Deep Learning Recommendation Model
Training" (arXiv 2508.03854). It takes the plan from TorchRec's planner; this one is smaller, and greedy.

The largest table comes first. It stays whole (*table-wise*) on the worker with the least work, if it fits
there and is not more than a fair share of all work; else every worker gets some of its rows (*row-wise*), or
of its columns (*column-wise*) if it has too few rows. Work is numbers read for a sample; memory is weights
and the optimizer's two numbers for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError

Sharding = Literal["auto", "table", "row", "column"]
Way = Literal["table", "row", "column"]

MOMENT_BYTES = 8
"""Of a row, for its optimizer: the moment, and that of the last synchronisation."""
MOST_ROWS = 2**31 - 1
"""Ids of a shard travel as 32-bit numbers."""


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table, before it has any memory."""

    name: str
    rows: int
    """Ids are 0 to rows - 1."""
    width: int
    """Numbers in a row."""
    pooling: Literal["sum", "mean"] = "sum"
    """What becomes of the rows that one sample names."""
    per_sample: float = 1.0
    """Ids that a sample has, about: the planner counts the work by it."""
    sharding: Sharding = "auto"
    """How it is split in a group; `auto`: the planner says."""

    def __post_init__(self) -> None:
        if not self.name or "." in self.name:
            raise ConfigError(
                f"an embedding table has a name, without dots, got {self.name!r}. Use letters, digits and _."
            )
        if self.rows < 1 or self.width < 1:
            raise ConfigError(
                f"table {self.name!r} has {self.rows} rows of width {self.width}: both are at least 1."
            )
        if self.pooling not in ("sum", "mean"):
            raise ConfigError(f"table {self.name!r}: pooling is sum or mean, got {self.pooling!r}.")
        if self.sharding not in ("auto", "table", "row", "column"):
            raise ConfigError(
                f"table {self.name!r}: sharding is auto, table, row or column, got {self.sharding!r}."
            )

    @property
    def work(self) -> float:
        """Numbers that are read for a sample."""
        return self.per_sample * self.width


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangle of a table, and who keeps it."""

    table: int
    """Its place in the list of tables."""
    owner: int
    """Its place on the axis `shard`."""
    first_row: int
    rows: int
    first_column: int
    columns: int

    def size_bytes(self, item_bytes: int) -> int:
        """What it takes, with what the optimizer remembers of it."""
        return self.rows * (self.columns * item_bytes + MOMENT_BYTES)


@dataclass(frozen=True, slots=True)
class Placement:
    """All shards of all tables, in the order of tables, rows and columns."""

    tables: tuple[Table, ...]
    owners: int
    shards: tuple[Shard, ...]
    item_bytes: int = 4

    def way(self, table: int) -> Way:
        """How a table is split."""
        mine = [shard for shard in self.shards if shard.table == table]
        if len(mine) == 1:
            return "table"
        return "row" if mine[0].columns == self.tables[table].width else "column"

    def memory_bytes(self, owner: int) -> int:
        """What a worker keeps."""
        return sum(shard.size_bytes(self.item_bytes) for shard in self.shards if shard.owner == owner)

    def lines(self) -> list[str]:
        """The plan for people: a line for each table."""
        return [
            f"table {table.name}: {table.rows:,} x {table.width}, {self.way(index)}-wise on "
            + ", ".join(str(shard.owner) for shard in self.shards if shard.table == index)
            for index, table in enumerate(self.tables)
        ]


def place(
    tables: Sequence[Table], owners: int, budget_bytes: int | None = None, item_bytes: int = 4
) -> Placement:
    """The plan for one group; every group has the same."""
    _check(tables, owners, budget_bytes, item_bytes)
    made = _greedy(tables, owners, budget_bytes, item_bytes, spread=False)
    if isinstance(made, Table):  # room is in pieces that are too small: let every worker have some of each
        first, made = made, _greedy(tables, owners, budget_bytes, item_bytes, spread=True)
        if isinstance(made, Table):
            raise ConfigError(
                f"table {first.name!r} ({first.rows:,} rows of width {first.width}) finds no place: every "
                f"worker has {_mb(budget_bytes or 0)}. Use a larger budget, a longer axis shard, or "
                "sharding='auto'."
            )
    return Placement(tuple(tables), owners, tuple(sorted(made, key=_order)), item_bytes)


def _order(shard: Shard) -> tuple[int, int, int]:
    return shard.table, shard.first_row, shard.first_column


def _check(tables: Sequence[Table], owners: int, budget_bytes: int | None, item_bytes: int) -> None:
    names = [table.name for table in tables]
    if not tables or len(set(names)) < len(names):
        raise ConfigError(f"embedding tables need names of their own, and one at least, got {names}.")
    if budget_bytes is None:
        return
    for table in tables:
        size = Shard(0, 0, 0, table.rows, 0, table.width).size_bytes(item_bytes)
        if size > owners * budget_bytes:
            raise ConfigError(
                f"table {table.name!r} takes {_mb(size)}, but the {owners} workers of a group have "
                f"{_mb(owners * budget_bytes)} together. Use a longer axis shard, or a larger budget."
            )
    total = sum(Shard(0, 0, 0, table.rows, 0, table.width).size_bytes(item_bytes) for table in tables)
    if total > owners * budget_bytes:
        raise ConfigError(
            f"the tables take {_mb(total)}, but the {owners} workers of a group have "
            f"{_mb(owners * budget_bytes)} together. Use a longer axis shard, or a larger budget."
        )


class _Room:
    """What the workers of a group have left, and what they have to do."""

    def __init__(self, owners: int, budget_bytes: int | None, item_bytes: int) -> None:
        self.work = [0.0] * owners
        self.used = [0] * owners
        self._budget, self._item = budget_bytes, item_bytes

    def fits(self, shard: Shard) -> bool:
        size = self.used[shard.owner] + shard.size_bytes(self._item)
        return shard.rows <= MOST_ROWS and (self._budget is None or size <= self._budget)

    def take(self, shard: Shard, work: float) -> None:
        self.used[shard.owner] += shard.size_bytes(self._item)
        self.work[shard.owner] += work

    def least(self) -> list[int]:
        """Workers, those with the least work first."""
        return sorted(range(len(self.work)), key=lambda owner: (self.work[owner], self.used[owner], owner))


def _greedy(
    tables: Sequence[Table], owners: int, budget_bytes: int | None, item_bytes: int, spread: bool
) -> list[Shard] | Table:
    """The shards; or the first table that finds no place."""
    room = _Room(owners, budget_bytes, item_bytes)
    fair = sum(table.work for table in tables) / owners
    made: list[Shard] = []
    for index in sorted(range(len(tables)), key=lambda each: (-tables[each].rows * tables[each].width, each)):
        table = tables[index]
        ways = _ways(table, owners, fair, spread)
        shards = next(filter(None, (_placed(table, index, way, room) for way in ways)), None)
        if shards is None:
            return table
        for shard in shards:
            room.take(shard, table.work / len(shards))
        made += shards
    return made


def _ways(table: Table, owners: int, fair: float, spread: bool) -> tuple[Way, ...]:
    """Ways to split a table, the best one first."""
    if table.sharding != "auto":
        return (table.sharding,)
    split: tuple[Way, Way] = ("row", "column") if table.rows >= owners else ("column", "row")
    if spread or table.work > 1.5 * fair:
        return (*split, "table")
    return ("table", *split)


def _placed(table: Table, index: int, way: Way, room: _Room) -> list[Shard] | None:
    owners = len(room.work)
    if way == "table" or owners == 1:
        whole = (Shard(index, owner, 0, table.rows, 0, table.width) for owner in room.least())
        found = next(filter(room.fits, whole), None)
        return None if found is None else [found]
    cut = pieces(table.rows if way == "row" else table.width, owners)
    shards = [
        Shard(index, owner, first, size, 0, table.width)
        if way == "row"
        else Shard(index, owner, 0, table.rows, first, size)
        for owner, (first, size) in enumerate(cut)
        if size
    ]
    return shards if all(map(room.fits, shards)) else None


def pieces(count: int, parts: int) -> list[tuple[int, int]]:
    """First and length of each part: all as long as the first, but for the last ones."""
    longest = -(-count // parts)
    return [
        (min(index * longest, count), max(0, min(longest, count - index * longest))) for index in range(parts)
    ]


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
