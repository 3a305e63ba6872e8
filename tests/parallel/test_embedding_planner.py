"""Where the planner puts tables: everything once, within the budget, and groups as in the paper."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.parallel.embedding.arenas import arenas_of
from paceline.parallel.embedding.planner import Placement, Table, pieces, place
from paceline.protocols.grid import Grid

ways = st.sampled_from(("auto", "table", "row", "column"))
some_tables = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 12), st.floats(0.5, 20), ways), min_size=1, max_size=6
).map(
    lambda drawn: [
        Table(f"t{at}", rows, width, per_sample=each, sharding=way)  # type: ignore[arg-type]
        for at, (rows, width, each, way) in enumerate(drawn)
    ]
)


def cells(placement: Placement) -> list[tuple[int, int, int]]:
    """Every number of every shard, by table, row and column."""
    return [
        (shard.table, row, column)
        for shard in placement.shards
        for row, column in product(
            range(shard.first_row, shard.first_row + shard.rows),
            range(shard.first_column, shard.first_column + shard.columns),
        )
    ]


@given(some_tables, st.integers(1, 5))
def test_every_number_of_every_table_is_on_exactly_one_worker(tables: list[Table], owners: int) -> None:
    found = cells(place(tables, owners))
    wanted = [(i, r, c) for i, t in enumerate(tables) for r in range(t.rows) for c in range(t.width)]
    assert sorted(found) == wanted


@given(some_tables, st.integers(1, 5), st.integers(200, 4000))
def test_a_plan_keeps_every_worker_within_its_budget_or_is_refused(
    tables: list[Table], owners: int, budget: int
) -> None:
    try:
        placement = place(tables, owners, budget)
    except ConfigError:
        return
    assert max(placement.memory_bytes(owner) for owner in range(owners)) <= budget
    assert all(placement.way(i) == t.sharding for i, t in enumerate(tables) if t.sharding == "table")


@given(some_tables, st.integers(1, 5))
def test_arenas_hold_the_shards_of_a_worker_one_after_another(tables: list[Table], owners: int) -> None:
    placement = place(tables, owners)
    for owner in range(owners):
        held = [seat for arena in arenas_of(placement, owner) for seat in arena.seats]
        assert {seat.shard for seat in held} == {s for s in placement.shards if s.owner == owner}
        for arena in arenas_of(placement, owner):
            ends = [0, *(seat.base + seat.shard.rows for seat in arena.seats)]
            assert [seat.base for seat in arena.seats] == ends[:-1]
            assert arena.rows == ends[-1]


@given(st.integers(1, 100), st.integers(1, 9))
def test_pieces_cover_a_length_and_none_is_longer_than_the_first(count: int, parts: int) -> None:
    cut = pieces(count, parts)
    assert len(cut) == parts
    assert [at for first, size in cut for at in range(first, first + size)] == list(range(count))
    assert max(size for _, size in cut) == cut[0][1] == -(-count // parts)


def test_small_tables_stay_whole_and_their_work_is_spread() -> None:
    placement = place([Table(f"t{i}", 100, 8) for i in range(6)], 3)
    assert all(placement.way(i) == "table" for i in range(6))
    assert sorted(shard.owner for shard in placement.shards) == [0, 0, 1, 1, 2, 2]


def test_a_table_that_no_worker_can_hold_is_split_by_rows_and_one_of_few_rows_by_columns() -> None:
    large = Table("large", 1000, 8)
    assert place([large, Table("t", 10, 8)], 2, budget_bytes=30_000).way(0) == "row"
    wide = Table("wide", 1, 4000)
    assert place([wide, Table("t", 10, 8)], 4, budget_bytes=8_000).way(0) == "column"


def test_a_table_with_most_of_the_work_is_split_though_it_would_fit() -> None:
    placement = place([Table("hot", 100, 8, per_sample=50.0), Table("a", 100, 8), Table("b", 100, 8)], 2)
    assert [placement.way(i) for i in range(3)] == ["row", "table", "table"]


def test_a_table_larger_than_the_memory_of_a_group_is_refused_with_both_sizes() -> None:
    with pytest.raises(
        ConfigError, match=r"'big' takes 40\.0 MB, but the 2 workers of a group have 20\.0 MB"
    ):
        place([Table("big", 1_000_000, 8), Table("t", 10, 8)], 2, budget_bytes=10_000_000)
    with pytest.raises(
        ConfigError, match=r"the tables take 8\.0 MB, but the 2 workers of a group have 6\.0 MB"
    ):
        place([Table("a", 100_000, 8), Table("b", 100_000, 8)], 2, budget_bytes=3_000_000)
    with pytest.raises(ConfigError, match=r"'a' .* finds no place: every worker has 5\.0 MB"):
        place([Table("a", 150_000, 8, sharding="table")], 2, budget_bytes=5_000_000)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "a.b"},
        {"rows": 0},
        {"width": 0},
        {"pooling": "max"},
        {"sharding": "diagonal"},
    ],
)
def test_tables_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Table(**({"name": "a", "rows": 3, "width": 2} | wrong))  # type: ignore[arg-type]


def test_tables_need_names_of_their_own() -> None:
    with pytest.raises(ConfigError, match="names of their own"):
        place([Table("a", 1, 1), Table("a", 2, 2)], 1)


@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_every_rank_is_in_one_group_and_one_line_of_copies_that_meet_in_it(
    groups: int, owners: int, first: bool
) -> None:
    """Invariant 10, for both orders of the axes."""
    axes = {"shard": owners, "data": groups} if first else {"data": groups, "shard": owners}
    grids = [Grid(axes, rank) for rank in range(groups * owners)]
    for grid in grids:
        shard, data = grid.ranks("shard"), grid.ranks("data")
        assert set(shard) & set(data) == {grid.rank}
        assert (len(shard), len(data)) == (owners, groups)
    for axis in axes:
        lines = {grid.ranks(axis) for grid in grids}
        assert sorted(rank for line in lines for rank in line) == list(range(groups * owners))


def test_the_papers_example_of_two_hosts() -> None:
    """Invariant 10: copies of a shard are neighbours with --mesh shard=4,data=2."""
    grids = [Grid({"shard": 4, "data": 2}, rank) for rank in range(8)]
    assert {grid.ranks("shard") for grid in grids} == {(0, 2, 4, 6), (1, 3, 5, 7)}
    assert {grid.ranks("data") for grid in grids} == {(0, 1), (2, 3), (4, 5), (6, 7)}
