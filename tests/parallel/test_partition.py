"""Where a model is cut, and how its batches are dealt: against trying everything."""

from __future__ import annotations

from itertools import combinations, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from paceline.errors import ConfigError
from paceline.parallel.loading import DealtRounds, MeshLoader
from paceline.parallel.pipeline.partition import check_cuts, partition
from paceline.runtime.worker.data.sample_order import BatchOrders


def slowest(costs: list[float], cuts: tuple[int, ...]) -> float:
    return max(sum(costs[start:end]) for start, end in pairwise((0, *cuts, len(costs))))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_faster_slowest_stage(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    cuts = partition(costs, stages)
    assert check_cuts(cuts, len(costs), stages) == cuts
    best = min(slowest(costs, each) for each in combinations(range(1, len(costs)), stages - 1))
    assert slowest(costs, cuts) == best


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 blocks, and the mesh 4 stages"):
        partition([1.0, 1.0, 1.0], 4)


@pytest.mark.parametrize("cuts", [(2,), (2, 2), (0, 3), (2, 5), (3, 2)])
def test_cuts_that_leave_a_stage_empty_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="do not cut 5 blocks into 3 stages"):
        check_cuts(cuts, 5, 3)


@given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 5))
def test_every_sample_is_dealt_to_exactly_one_copy(sizes: list[int], copies: int) -> None:
    numbers = iter(range(1000))
    batches = [[next(numbers) for _ in range(size)] for size in sizes]
    rounds = DealtRounds(BatchOrders(batches, len(batches), 0, None), 0, copies)
    dealt = [index for at in range(len(rounds)) for batch in rounds[at] for index in batch]
    every = [index for batch in batches for index in batch]
    assert sorted(dealt) == every[: len(dealt)]
    assert len(every) - len(dealt) < copies
    assert all(len(rounds[at]) == copies and all(rounds[at]) for at in range(len(rounds)))


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_a_meshs_loader_has_as_many_batches_as_it_says(n: int, size: int, copies: int, drop: bool) -> None:
    loader = DataLoader(range(n), size, drop_last=drop)  # type: ignore[arg-type]
    whole, left = divmod(n, size * copies)
    expected = whole + (left >= copies and not drop)
    if not expected:
        with pytest.raises(ConfigError, match="too few for one update"):
            MeshLoader(loader, 0, copies, 0)
        return
    dealt = MeshLoader(loader, 0, copies, 0)
    batches = list(dealt)
    assert len(dealt) == len(batches) == expected
    assert not drop or all(len(batch) == size for batch in batches)


def test_a_pass_goes_on_where_the_last_was_broken_off() -> None:
    said: list[str] = []
    dealt = MeshLoader(DataLoader(range(24), 3), 1, 2, 0)  # type: ignore[arg-type]
    dealt.say = said.append
    first = [batch.tolist() for batch in islice(dealt, 2)]
    second = [batch.tolist() for batch in dealt]
    assert first + second == [[3, 4, 5], [9, 10, 11], [15, 16, 17], [21, 22, 23]]
    assert [batch.tolist() for batch in dealt] == first + second
    assert len(said) == 1
    assert "broke off a pass over the loader after 2 of 4 batches" in said[0]


def test_after_the_last_batch_of_an_epoch_comes_the_next_epoch() -> None:
    said: list[str] = []
    dealt = MeshLoader(DataLoader(range(8), 2), 0, 2, 0)  # type: ignore[arg-type]
    dealt.say = said.append
    for _ in range(3):
        assert [batch.tolist() for batch in islice(dealt, 2)] == [[0, 1], [4, 5]]
    assert dealt.epoch == 2
    assert not said


def test_a_resumed_script_goes_on_within_the_epoch_whatever_it_breaks_off() -> None:
    dealt = MeshLoader(DataLoader(range(8), 1), 0, 2, 0)  # type: ignore[arg-type]
    dealt.resume(1, 2)
    assert list(dealt) == []
    assert [next(iter(dealt)).tolist() for _ in range(3)] == [[4], [6], [0]]


def test_two_passes_at_once_are_refused() -> None:
    dealt = MeshLoader(DataLoader(range(8), 1), 0, 2, 0)  # type: ignore[arg-type]
    outer = iter(dealt)
    next(outer)
    next(iter(dealt))
    with pytest.raises(ConfigError, match="goes on with a pass over the loader after it has begun another"):
        next(outer)
