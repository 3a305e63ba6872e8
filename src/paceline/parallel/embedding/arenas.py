"""Where shards lie: all of a worker's shards with rows of one width are one matrix, an *arena*.

So a step looks up, adds up and updates once for each width, not once for each table. Everybody knows all
arenas of the group, because whoever sends an id says at which row of the owner's arena it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from zlib import crc32

import torch
from torch import Tensor

from paceline.parallel.embedding.planner import Placement, Shard, Table

BLOCK = 4096
"""Rows that are drawn from one generator: first weights do not depend on how a table is split."""


@dataclass(frozen=True, slots=True)
class ArenaSeat:
    """A shard, and where it begins in its arena."""

    shard: Shard
    base: int


@dataclass(frozen=True, slots=True)
class Arena:
    """One matrix of one worker."""

    width: int
    seats: tuple[ArenaSeat, ...]

    @property
    def rows(self) -> int:
        """Of all its shards."""
        return sum(seat.shard.rows for seat in self.seats)


def arenas_of(placement: Placement, owner: int) -> tuple[Arena, ...]:
    """A worker's matrices, the narrowest first. Who has no shard has an empty one: optimizers want one."""
    mine = [shard for shard in placement.shards if shard.owner == owner]
    if not mine:
        return (Arena(placement.tables[0].width, ()),)
    return tuple(
        _arena(width, [shard for shard in mine if shard.columns == width])
        for width in sorted({shard.columns for shard in mine})
    )


def _arena(width: int, shards: list[Shard]) -> Arena:
    seats, base = [], 0
    for shard in shards:
        seats.append(ArenaSeat(shard, base))
        base += shard.rows
    return Arena(width, tuple(seats))


def fill(arena: Arena, tables: tuple[Table, ...], weight: Tensor, seed: int) -> None:
    """First weights: uniform in ±1/sqrt(rows), as TorchRec's."""
    for seat in arena.seats:
        shard, table = seat.shard, tables[seat.shard.table]
        first = shard.first_row // BLOCK
        for block in range(first, -(-(shard.first_row + shard.rows) // BLOCK)):
            drawn = _block(table, block, seed, weight.dtype)
            low = max(shard.first_row, block * BLOCK)
            high = min(shard.first_row + shard.rows, block * BLOCK + len(drawn))
            at = seat.base + low - shard.first_row
            part = drawn[low - block * BLOCK : high - block * BLOCK]
            weight[at : at + high - low] = part[:, shard.first_column : shard.first_column + shard.columns]


def _block(table: Table, block: int, seed: int, dtype: torch.dtype) -> Tensor:
    number = crc32(f"{seed}/{table.name}/{block}".encode())
    rows = min(BLOCK, table.rows - block * BLOCK)
    most = 1 / sqrt(table.rows)
    drawn = torch.empty(rows, table.width, dtype=dtype)
    return drawn.uniform_(-most, most, generator=torch.Generator().manual_seed(number))
