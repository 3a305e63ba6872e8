"""Orders are those of plain PyTorch, bit for bit, of any length and in any pieces."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.errors import ConfigError
from paceline.parallel.loading import MeshLoader
from paceline.parallel.plans.shared_loader import SharedLoader
from paceline.runtime.worker.data import drawing, sample_order
from paceline.runtime.worker.data.drawing import pieces_of
from paceline.runtime.worker.data.sample_order import SampleOrders

Generator = torch.Generator | None


class Mixed(Sampler[Any]):
    """Draws from every generator there is while it is iterated over."""

    def __init__(self, count: int, generator: Generator = None) -> None:
        self.count, self.generator = count, generator

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            drawn = int(torch.randint(1000, (1,), generator=self.generator))
            yield drawn + int(random.random() * 1000) + int(np.random.randint(1000))


class InBatches(Mixed):
    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            yield list(range(each, each + each % 4))


class Named(Mixed):
    """Indices of a dataset that is a dictionary."""

    def __iter__(self) -> Iterator[Any]:
        return (f"row {each}" for each in super().__iter__())


class Large(Mixed):
    """Indices that are no 64-bit numbers."""

    def __iter__(self) -> Iterator[Any]:
        return (each << 80 for each in super().__iter__())


KINDS: dict[str, Callable[[int, Generator], Any]] = {
    "in order": lambda n, g: SequentialSampler(range(n)),
    "shuffled": lambda n, g: RandomSampler(range(n), generator=g),
    "a part": lambda n, g: RandomSampler(range(2 * n), num_samples=n, generator=g),
    "several times": lambda n, g: RandomSampler(range(7), num_samples=n, generator=g),
    "with replacement": lambda n, g: RandomSampler(range(5), True, n, g),
    "with replacement of very many": lambda n, g: RandomSampler(range(2**40), True, n, g),
    "by weight": lambda n, g: WeightedRandomSampler([0.5, 0.0, 3.0, 1.0], n, True, g),
    "by weight, once each": lambda n, g: WeightedRandomSampler([1.0, 2.0] * n, n, False, g),
    "of a subset": lambda n, g: SubsetRandomSampler([3 * i for i in range(n)], g),
    "batches": lambda n, g: BatchSampler(RandomSampler(range(n), generator=g), 1, False),
    "own": Mixed,
    "own batches": InBatches,
    "names": Named,
    "large": Large,
}


def generators_now(own: Generator) -> list[str]:
    state = own.get_state() if own is not None else torch.empty(0)
    return [str(each) for each in (torch.get_rng_state().tolist(), state.tolist(), random.getstate())]


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 200), own=st.booleans(), block=st.sampled_from([1, 3, 64, 500]))
def test_a_pass_drawn_in_pieces_is_what_the_sampler_gives_and_leaves_generators_where_it_does(
    kind: str, n: int, own: bool, block: int
) -> None:
    found = []
    for pieces in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        generator = torch.Generator().manual_seed(4) if own else None
        sampler = KINDS[kind](n, generator)
        with patch.object(drawing, "BLOCK", block):
            given_ = pieces_of(sampler) if pieces else None
            items = list(sampler) if given_ is None else [i for p in given_ for i in p.cut(0, len(p))]
        found.append((items, [type(item) for item in items], generators_now(generator)))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", list(KINDS)[:9])
def test_samplers_of_torch_are_not_iterated_over_one_by_one(kind: str, monkeypatch: Any) -> None:
    monkeypatch.delattr(drawing, "iterated")
    assert sum(map(len, pieces_of(KINDS[kind](40, None)))) == 40


def test_a_sampler_of_a_torch_that_draws_in_another_way_is_iterated_over(monkeypatch: Any) -> None:
    def draws(self: Any) -> Iterator[int]:
        return iter(torch.randperm(len(self.data_source), generator=self.generator).flip(0).tolist())

    monkeypatch.setattr(RandomSampler, "__iter__", draws)
    own = [torch.Generator().manual_seed(1) for _ in range(2)]
    expected = list(RandomSampler(range(50), generator=own[0]))
    (piece,) = pieces_of(RandomSampler(range(50), generator=own[1]))
    assert piece.cut(0, 50) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(
    n=st.integers(1, 120),
    own=st.booleans(),
    kept=st.integers(1, 60),
    reads=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 119), st.integers(0, 30)), max_size=12),
)
def test_any_part_of_any_epoch_is_the_same_whatever_was_read_before(
    kind: str, n: int, own: bool, kept: int, reads: list[tuple[int, int, int]]
) -> None:
    """Also parts that are no longer in memory, and epochs that were begun in turn; the script's own random
    numbers are as they were."""
    sampler = KINDS[kind](n, torch.Generator().manual_seed(4) if own else None)
    whole = SampleOrders(sampler, n, seed=5)
    expected = [whole[epoch][:] for epoch in range(3)]
    with patch.object(drawing, "BLOCK", 16), patch.object(sample_order, "KEPT", kept):
        orders = SampleOrders(sampler, n, seed=5)
        for epoch, start, count in reads:
            before = generators_now(getattr(sampler, "generator", None))
            assert orders[epoch][start : start + count] == expected[epoch][start : start + count]
            assert generators_now(getattr(sampler, "generator", None)) == before


ENDLESS = 10**10


def minutes_long(own: bool = False) -> RandomSampler:
    return RandomSampler(range(1000), True, ENDLESS, torch.Generator().manual_seed(2) if own else None)


@pytest.mark.parametrize("own", [False, True])
def test_the_beginning_of_ten_billion_positions_is_that_of_plain_pytorch(own: bool) -> None:
    sampler = minutes_long(own)
    order = SampleOrders(sampler, ENDLESS, seed=0)[0]
    first = order[:100_000]
    if own:
        assert first == list(islice(minutes_long(own), 100_000))
    assert order[70_000:70_100] == first[70_000:70_100]


@pytest.mark.parametrize("batched", [False, True])
def test_a_mesh_and_a_plan_begin_with_an_endless_sampler_too(batched: bool) -> None:
    def loader(workers: int) -> DataLoader[int]:
        drawn = BatchSampler(minutes_long(True), 4, False)
        data: Any = range(1000)
        if batched:
            return DataLoader(data, batch_sampler=drawn, num_workers=workers)
        return DataLoader(data, 4, sampler=minutes_long(True), num_workers=workers)

    alone = list(islice(loader(0), 6))
    for workers in (0, 1):
        copies = [islice(MeshLoader(loader(workers), copy, 2, 0), 3) for copy in range(2)]
        assert [x.tolist() for pair in zip(*copies, strict=True) for x in pair] == [x.tolist() for x in alone]
    if not batched:
        ranks = [islice(SharedLoader(loader(0), 2, rank, 2, seed=0), 6) for rank in range(2)]
        assert [torch.cat(both).tolist() for both in zip(*ranks, strict=True)] == [x.tolist() for x in alone]


class Lying(Sampler[int]):
    """Has another length than it says."""

    def __init__(self, says: int, gives: Iterator[int] | range) -> None:
        self.says, self.gives = says, gives

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[int]:
        return iter(self.gives)


def forever() -> Iterator[int]:
    while True:
        yield 1


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (Lying(20, range(19)), "gave 19 of the 20"),
        (Lying(20, range(21)), "gave more than the 20"),
        (Lying(64, range(65)), "gave more than the 64"),
        (Lying(20, forever()), "gave more than the 20"),
    ],
)
def test_a_sampler_that_gives_another_number_than_it_says_is_refused(
    sampler: Lying, said: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(drawing, "BLOCK", 64)
    with pytest.raises(ConfigError, match=said):
        _ = SampleOrders(sampler, sampler.says, seed=0)[0][:]


def test_drawing_that_takes_long_is_told_of(monkeypatch: Any) -> None:
    monkeypatch.setattr(sample_order, "QUIET_S", -1.0)
    monkeypatch.setattr(drawing, "BLOCK", 64)
    said: list[str] = []
    orders = SampleOrders(Mixed(512), 512, 0, say=said.append)
    _ = orders[0][300:301]
    assert said[0] == ("drawing the order of epoch 0 from the loader's sampler: 256 of 512 positions so far")
