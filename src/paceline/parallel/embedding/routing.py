"""From the ids of a batch to what each owner is sent: how many for each sample, and rows of its arenas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.parallel.embedding.arenas import Arena, ArenaSeat
from paceline.parallel.embedding.planner import Table

Ids = Tensor | tuple[Tensor, Tensor]
"""One row of ids for each sample, or ids in a row with the place where each sample begins."""


class Bags(NamedTuple):
    """The ids of one table, sample after sample."""

    ids: Tensor
    lengths: Tensor
    """Ids of each sample."""
    each: int | None
    """The same number, if it is one for all."""


class OwnerParcel(NamedTuple):
    """What one owner is sent: one tensor, and how it is cut."""

    numbers: list[Tensor]
    """Lengths of all its shards, then the rows of each arena."""
    counts: list[int]
    """Rows for each arena."""


def read_bags(tables: Sequence[Table], features: Mapping[str, Ids]) -> tuple[list[Bags], int]:
    """The ids of all tables, checked, and how many samples there are."""
    if set(features) != {table.name for table in tables}:
        names = ", ".join(sorted(table.name for table in tables))
        raise ConfigError(f"ids were given for {', '.join(sorted(features))}, but the tables are {names}.")
    bags = [_bags(table, features[table.name]) for table in tables]
    sizes = {table.name: len(bag.lengths) for table, bag in zip(tables, bags, strict=True)}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"all tables are asked for one batch, but the ids are of {sizes} samples.")
    return bags, len(bags[0].lengths)


def _bags(table: Table, given: Ids) -> Bags:
    if isinstance(given, Tensor):
        if given.dim() not in (1, 2):
            raise ConfigError(
                f"table {table.name!r}: ids have one or two dimensions, got {tuple(given.shape)}."
            )
        each = 1 if given.dim() == 1 else given.shape[1]
        ids, lengths = given.reshape(-1), torch.full((len(given),), each, dtype=torch.int32)
    else:
        each, (ids, offsets) = None, given
        lengths = torch.diff(offsets, append=offsets.new_tensor([len(ids)])).to(torch.int32)
        if len(offsets) and (int(offsets[0]) != 0 or bool((lengths < 0).any())):
            raise ConfigError(
                f"table {table.name!r}: offsets begin at 0 and do not fall, as for nn.EmbeddingBag."
            )
    _check_range(table, ids)
    return Bags(ids.to(torch.int32), lengths, each)


def _check_range(table: Table, ids: Tensor) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"table {table.name!r}: ids are int64 or int32, got {ids.dtype}.")
    if not len(ids):
        return
    low, high = (int(each) for each in torch.aminmax(ids))
    if low < 0 or high >= table.rows:
        wrong = low if low < 0 else high
        raise ConfigError(
            f"table {table.name!r}: id {wrong} is out of range, it has {table.rows} rows. Use ids from 0 to "
            f"{table.rows - 1}, or more rows."
        )


def parcel(arenas: Sequence[Arena], tables: Sequence[Table], bags: Sequence[Bags]) -> OwnerParcel:
    """What the owner of these arenas needs to know of a batch."""
    lengths: list[Tensor] = []
    rows: list[Tensor] = []
    counts: list[int] = []
    for arena in arenas:
        cut = [_cut(seat, tables[seat.shard.table], bags[seat.shard.table]) for seat in arena.seats]
        lengths += [length for length, _ in cut]
        rows += [row for _, row in cut]
        counts.append(sum(len(row) for _, row in cut))
    return OwnerParcel([*lengths, *rows], counts)


def _cut(seat: ArenaSeat, table: Table, bag: Bags) -> tuple[Tensor, Tensor]:
    """Of a table's ids those that a shard has, as rows of its arena."""
    shard = seat.shard
    if shard.rows == table.rows:
        return bag.lengths, bag.ids + seat.base if seat.base else bag.ids
    mine = (bag.ids >= shard.first_row) & (bag.ids < shard.first_row + shard.rows)
    rows = bag.ids[mine] + (seat.base - shard.first_row)
    if bag.each is not None:
        return mine.view(-1, bag.each).sum(1, dtype=torch.int32), rows
    before = torch.zeros(len(bag.ids) + 1, dtype=torch.int32)
    torch.cumsum(mine, 0, out=before[1:])
    ends = torch.cumsum(bag.lengths, 0)
    return before[ends] - before[ends - bag.lengths], rows
