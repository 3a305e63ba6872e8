"""What is cut at every stage: always a dimension that is not attended over, switched as rarely as can be."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.parallel.sequence import layouts

DIMS = (1, 2, 3)
stages = st.lists(st.sets(st.sampled_from(DIMS), max_size=2), min_size=1, max_size=5)


def switches(chosen: tuple[int, ...] | list[int]) -> int:
    return sum(one != other for one, other in pairwise(chosen))


@given(stages)
def test_nothing_is_attended_over_that_is_cut_and_no_choice_switches_less(attended: list[set[int]]) -> None:
    chosen = layouts(attended, DIMS)
    legal = [
        c
        for c in product(DIMS, repeat=len(attended))
        if all(d not in a for d, a in zip(c, attended, strict=True))
    ]
    assert tuple(chosen) in legal
    assert switches(chosen) == min(map(switches, legal))


def test_space_and_time_in_turns_switch_once_between_blocks() -> None:
    assert layouts([{2}, {1}] * 3, (1, 2)) == [1, 2] * 3
    assert layouts([{2}, {1}], (1, 2), first=1) == [1, 2]


def test_a_stage_that_attends_over_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stage 1 attends over all of the dimensions \[1, 2\]"):
        layouts([{1}, {1, 2}], (1, 2))
