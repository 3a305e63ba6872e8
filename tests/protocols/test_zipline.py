"""ZipLine against all choices there are, and the paper's two heuristics against ZipLine."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.protocols.rules.zipline import SEARCHES, Rows, full_grid_scan, grid_scan, zipline

eighths = st.integers(0, 80).map(lambda n: n / 8)
any_rows = st.lists(st.lists(eighths, min_size=1, max_size=5).map(sorted), min_size=1, max_size=4)
steady_rows = st.lists(
    st.tuples(eighths, st.integers(0, 24).map(lambda n: n / 8)).map(
        lambda row: [row[0] + i * row[1] for i in range(1, 6)]
    ),
    min_size=1,
    max_size=4,
)
rows = st.one_of(any_rows, steady_rows)
every_search = pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)


def chosen(ends: Rows, quotas: list[int]) -> list[float]:
    return [row[quota - 1] for row, quota in zip(ends, quotas, strict=True)]


def span(ends: Rows, quotas: list[int]) -> float:
    return max(chosen(ends, quotas)) - min(chosen(ends, quotas))


def best_of_all(ends: Rows) -> list[int]:
    """By trying each of the R^n choices: the closest, then the one that begins first, then the fewest."""
    choices = map(list, product(*(range(1, len(row) + 1) for row in ends)))
    return min(choices, key=lambda quotas: (span(ends, quotas), min(chosen(ends, quotas)), quotas))


@settings(max_examples=500)
@given(ends=rows)
def test_chooses_the_earliest_of_the_closest_of_all_choices(ends: Rows) -> None:
    assert zipline(ends) == best_of_all(ends)


@pytest.mark.parametrize(
    ("ends", "quotas", "closest"),
    [
        ([[2, 4, 6, 8], [3, 6, 9, 12], [5, 10, 15, 20]], [3, 2, 1], 1),
        ([[i * each for i in range(1, 8)] for each in (1.0, 1.7, 1.3)], [5, 3, 4], 0.2),
        ([[1, 2, 3]] * 4, [1, 1, 1, 1], 0),
        ([[1, 2, 3]], [1], 0),
        ([[1, 2], [2, 4], [2, 3]], [2, 1, 1], 0),
        ([[1, 9], [2, 8]], [1, 1], 1),
    ],
    ids=["whole", "fractions", "equal-speeds", "alone", "zero-at-last", "first-of-equals"],
)
def test_worked_examples(ends: list[list[float]], quotas: list[int], closest: float) -> None:
    assert zipline(ends) == quotas
    assert span(ends, quotas) == pytest.approx(closest)


@every_search
@given(ends=rows, shift=st.integers(-800, 800), power=st.integers(-8, 8))
def test_shift_and_scale_of_all_times_leave_the_quotas_as_they_are(
    search: type[zipline], ends: Rows, shift: int, power: int
) -> None:
    moved = [[(end + shift / 8) * 2.0**power for end in row] for row in ends]
    assert search(moved) == search(ends)


@every_search
@given(ends=rows)
def test_every_worker_gets_one_of_its_own_ends(search: type[zipline], ends: Rows) -> None:
    quotas = search(ends)
    assert len(quotas) == len(ends)
    assert all(1 <= quota <= len(row) for row, quota in zip(ends, quotas, strict=True))


@every_search
def test_nobody_gets_nothing(search: type[zipline]) -> None:
    assert search([]) == []


@settings(max_examples=100)
@given(ends=rows)
def test_the_heuristics_are_never_better_and_the_full_scan_never_worse_than_the_other(ends: Rows) -> None:
    best, full, grid = (span(ends, search(ends)) for search in (zipline, full_grid_scan, grid_scan))
    assert best <= full <= grid


@given(ends=st.lists(st.lists(eighths, min_size=1, max_size=5).map(sorted), min_size=2, max_size=2))
def test_of_two_workers_the_full_scan_finds_the_closest_ends(ends: Rows) -> None:
    assert span(ends, full_grid_scan(ends)) == span(ends, zipline(ends))


@pytest.mark.parametrize(
    ("search", "ends", "quotas", "best"),
    [
        (grid_scan, [[8, 9], [1, 5], [1, 9]], [1, 1, 1], [1, 2, 2]),
        (full_grid_scan, [[4, 7, 15], [1, 10, 13], [1, 5, 10], [6, 12, 15]], [1, 1, 2, 1], [2, 2, 3, 1]),
    ],
    ids=["grid", "full-grid"],
)
def test_the_heuristics_do_miss_the_best(
    search: type[zipline], ends: Rows, quotas: list[int], best: list[int]
) -> None:
    assert search(ends) == quotas
    assert zipline(ends) == best
    assert span(ends, best) < span(ends, quotas)
