"""The order of an epoch, the same for every worker, and loaders that draw from the run's budget."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.errors import ConfigError
from paceline.parallel.loading import MeshLoader
from paceline.runtime.worker.data.loader import (
    Dispensed,
    SampleOrders,
    StridedLoader,
    count_samples,
    paced_loader,
    source_of,
)
from paceline.runtime.worker.data.second_pass import SecondPass
from paceline.store.work.budget import Batch, Source

DATA = TensorDataset(torch.arange(20))


class ByNumPy(Sampler[int]):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(20).tolist())


class ByPython(ByNumPy):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(20), 20))


class ByEpoch(ByNumPy):
    """As those for distributed training: the order is told by `set_epoch`."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i * 7 + self.epoch) % 20 for i in range(20)])


SAMPLERS = {
    "random": lambda: RandomSampler(DATA),
    "generator": lambda: RandomSampler(DATA, generator=torch.Generator().manual_seed(9)),
    "weighted": lambda: WeightedRandomSampler(range(1, 21), 20),
    "numpy": ByNumPy,
    "python": ByPython,
    "epoch": ByEpoch,
    "batches": lambda: BatchSampler(RandomSampler(DATA, generator=torch.Generator()), 1, False),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_worker_draws_the_same_order_whatever_it_did_before(kind: str) -> None:
    torch.manual_seed(1)
    mine = [SampleOrders(SAMPLERS[kind](), 20, seed=3)[epoch][:] for epoch in range(3)]
    torch.manual_seed(2)
    np.random.seed(5)
    random.seed(6)
    other = SampleOrders(SAMPLERS[kind](), 20, seed=3)
    assert [other[2][:], other[0][:], other[1][:]] == [mine[2], mine[0], mine[1]]
    assert mine[0] != mine[1]
    if kind not in ("epoch", "generator", "batches"):  # which have seeds of their own
        assert SampleOrders(SAMPLERS[kind](), 20, seed=4)[0][:] != mine[0]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_drawing_an_order_leaves_the_generators_as_they_were(kind: str) -> None:
    sampler = SAMPLERS[kind]()
    own = getattr(sampler, "generator", None)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    own_state = own.get_state() if own is not None else None
    _ = SampleOrders(sampler, 20, seed=3)[0][:]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    if own is not None:
        assert torch.equal(own.get_state(), own_state)


def test_a_sampler_that_gives_fewer_than_it_says_is_refused() -> None:
    with pytest.raises(ConfigError, match="gave 10 of the 20"):
        _ = SampleOrders(SequentialSampler(range(10)), 20, seed=0)[0][:]


class Link:
    """A store that hands these batches out."""

    def __init__(self, *batches: Batch) -> None:
        self.batches = deque(batches)
        self.config = SimpleNamespace(workers=2)
        self.enough = False

    def next_batch(self, epoch: int) -> Batch | None:
        return self.batches.popleft() if self.batches and self.batches[0].epoch <= epoch else None

    def put_back(self, batch: Batch) -> None:
        self.batches.appendleft(batch)


def paced(
    link: Any, arrived: list[Any], loader: DataLoader[Any] | None = None, first: int = 0
) -> DataLoader[Any]:
    loader = loader or DataLoader(DATA, batch_size=4)
    source, sampler, whole = source_of(loader)
    assert source is not None
    dispensed = Dispensed(link, SampleOrders(sampler, source.units, 0), source, whole, first)
    loaded: DataLoader[Any] = paced_loader(
        loader,
        dispensed,
        lambda: None,
        lambda samples, batch: arrived.append((samples, batch)),
        lambda: None,
        SecondPass(lambda: None),
    )
    return loaded


def test_one_pass_is_one_epoch_and_every_batch_is_told() -> None:
    arrived: list[Any] = []
    batches = (Batch(0, 4, 4), Batch(0, 16, 4), Batch(1, 0, 4))
    loader = paced(Link(*batches), arrived)
    assert [x.tolist() for (x,) in loader] == [[4, 5, 6, 7], [16, 17, 18, 19]]
    assert [x.tolist() for (x,) in loader] == [[0, 1, 2, 3]]
    assert arrived == [(4, batch) for batch in batches]
    assert len(loader) == 3  # five batches for two workers


def test_a_pass_whose_epoch_is_over_is_empty() -> None:
    """A slow worker comes to an epoch that the others have finished."""
    arrived: list[Any] = []
    loader = paced(Link(Batch(2, 0, 4)), arrived)
    assert [len(list(loader)) for _ in range(3)] == [0, 0, 1]


def test_a_resumed_script_passes_over_what_is_behind_it() -> None:
    arrived: list[Any] = []
    loader = paced(Link(Batch(2, 8, 4), Batch(3, 0, 4)), arrived, first=2)
    assert [len(list(loader)) for _ in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("processes", [0, 2])
def test_a_loop_that_breaks_off_goes_on_where_it_was(processes: int) -> None:
    """With processes that load ahead, several batches have been handed out by then."""
    arrived: list[Any] = []
    batches = [Batch(0, first, 4) for first in range(0, 20, 4)]
    loader = paced(Link(*batches), arrived, DataLoader(DATA, batch_size=4, num_workers=processes))
    seen = []
    for _ in range(2):
        for (x,) in loader:
            seen += x.tolist()
            break
    seen += [i for (x,) in loader for i in x.tolist()]
    assert seen == list(range(20))
    assert [batch for _, batch in arrived] == batches


@pytest.mark.parametrize("processes", [0, 2])
def test_a_loop_that_takes_all_and_does_not_ask_for_the_end_begins_the_next_epoch(processes: int) -> None:
    batches = [Batch(epoch, first, 4) for epoch in range(3) for first in range(0, 20, 4)]
    loader = paced(Link(*batches), [], DataLoader(DATA, batch_size=4, num_workers=processes))
    for _ in range(3):
        assert [i for (x,) in islice(loader, 5) for i in x.tolist()] == list(range(20))
    assert not list(loader)


def test_batches_that_are_taken_one_by_one_come_epoch_after_epoch() -> None:
    batches = [Batch(epoch, first, 4) for epoch in range(3) for first in range(0, 20, 4)]
    loader = paced(Link(*batches), [])
    assert [next(iter(loader))[0].tolist()[0] for _ in batches] == [batch.first for batch in batches]


@pytest.mark.parametrize("processes", [0, 2])
def test_what_is_left_of_an_epoch_is_a_pass_of_its_own(processes: int) -> None:
    """Also where processes had loaded all of it when the loop broke off."""
    batches = [Batch(epoch, first, 4) for epoch in range(2) for first in range(0, 20, 4)]
    loader = paced(Link(*batches), [], DataLoader(DATA, batch_size=4, num_workers=processes))
    assert len(list(islice(loader, 3))) == 3
    assert [len(list(loader)) for _ in range(2)] == [2, 5]


def test_after_the_end_of_all_work_no_epoch_begins() -> None:
    link = Link(Batch(0, 0, 4), Batch(1, 0, 4))
    loader = paced(link, [])
    next(iter(loader))
    link.enough = True
    assert not list(loader)


def test_what_a_loader_offers_is_known() -> None:
    assert source_of(DataLoader(DATA, batch_size=8))[0] == Source(20, 8, False)
    assert source_of(DataLoader(DATA, batch_size=8, drop_last=True))[0] == Source(20, 8, True)
    own = BatchSampler(SequentialSampler(DATA), 6, False)
    assert source_of(DataLoader(DATA, batch_sampler=own))[0] == Source(20, 6, False)

    class Mine(BatchSampler):
        pass

    batches = Mine(SequentialSampler(DATA), 6, False)
    assert source_of(DataLoader(DATA, batch_sampler=batches)) == (Source(4, 1, whole=True), batches, True)


def test_loaders_that_cannot_be_dispensed_are_refused() -> None:
    with pytest.raises(ConfigError, match="DistributedSampler"):
        source_of(DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=1)))


class Endless(Sampler[Any]):
    """Does not say how much it gives."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(20))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_size=4, sampler=Endless()),
        DataLoader(DATA, batch_sampler=Endless()),
        DataLoader(DATA, batch_size=None, sampler=Endless()),
    ],
)
def test_a_sampler_without_a_length_is_refused_by_name(loader: DataLoader[Any]) -> None:
    with pytest.raises(ConfigError, match=r"sampler \(Endless\) has no length"):
        source_of(loader)


def test_a_mesh_refuses_a_sampler_without_a_length_too() -> None:
    with pytest.raises(ConfigError, match=r"sampler \(Endless\) has no length"):
        MeshLoader(DataLoader(DATA, batch_size=4, sampler=Endless()), 0, 2, 0)


class Chunks(ByEpoch):
    """Whole batches."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        order = list(super().__iter__())
        return (order[first : first + 5] for first in range(0, 20, 5))


def test_telling_a_prepared_loader_the_epoch_does_nothing_and_no_harm() -> None:
    """Its sampler is told by the run, on every worker alike."""
    batches = [Batch(epoch, first, 1) for epoch in range(2) for first in range(4)]
    loader: Any = paced(Link(*batches), [], DataLoader(DATA, batch_sampler=Chunks()))
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        assert [i for (x,) in loader for i in x.tolist()] == [(i * 7 + epoch) % 20 for i in range(20)]


def test_a_sampler_is_told_the_epoch_through_those_that_make_batches_of_it() -> None:
    loader: Any = MeshLoader(DataLoader(DATA, batch_size=4, sampler=ByEpoch()), 0, 1, 0)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        assert [i for (x,) in loader for i in x.tolist()] == [(i * 7 + epoch) % 20 for i in range(20)]


class Halved(DataLoader[Any]):
    """A loader with ways of its own."""

    def __iter__(self) -> Any:
        return ((x / 2,) for (x,) in super().__iter__())


class Twice(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (each for data in super().__iter__() for each in (data, data))


class Joined(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield list(super().__iter__())


@pytest.mark.parametrize("processes", [0, 2])
def test_a_loader_of_a_class_of_its_own_keeps_its_ways(processes: int) -> None:
    arrived: list[Any] = []
    mine = Halved(DATA, batch_size=4, num_workers=processes, persistent_workers=processes > 0)
    assert len(list(mine)) == 5  # also one that has been used
    loader = paced(Link(Batch(0, 4, 4), Batch(0, 0, 4)), arrived, mine)
    assert isinstance(loader, Halved)
    assert [x.tolist() for (x,) in loader] == [[2.0, 2.5, 3.0, 3.5], [0.0, 0.5, 1.0, 1.5]]
    assert len(arrived) == 2
    assert len(list(mine)) == 5


@pytest.mark.parametrize(("kind", "said"), [(Twice, "more items"), (Joined, "fewer items")])
def test_a_loader_that_does_not_yield_one_item_per_batch_is_refused(
    kind: type[DataLoader[Any]], said: str
) -> None:
    loader = paced(Link(Batch(0, 4, 4), Batch(0, 0, 4)), [], kind(DATA, batch_size=4))
    with pytest.raises(ConfigError, match=said):
        list(loader)


def test_samplers_stay_in_reach_of_the_script() -> None:
    """Rank-aware loops call loader.sampler.set_epoch(epoch)."""
    mine = RandomSampler(range(20))
    assert paced(Link(), [], DataLoader(DATA, batch_size=4, sampler=mine)).sampler is mine


def test_a_dataset_of_whole_batches_is_dispensed_batch_by_batch() -> None:
    whole = [torch.arange(first, first + 4) for first in range(0, 20, 4)]
    arrived: list[Any] = []
    given = (Batch(0, 3, 1), Batch(0, 1, 1))
    loader = paced(Link(*given), arrived, DataLoader(whole, batch_size=None))  # type: ignore[arg-type]
    assert [x.tolist() for x in loader] == [[12, 13, 14, 15], [4, 5, 6, 7]]
    assert arrived == [(4, batch) for batch in given]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_a_stream_is_taken_in_turn() -> None:
    loader = DataLoader(Stream(), batch_size=2)
    assert source_of(loader) == (None, None, False)
    arrived: list[int] = []
    parts = [
        StridedLoader(loader, rank, 2, arrived.append, SecondPass(lambda: None), lambda: False)
        for rank in (0, 1)
    ]
    assert [x.tolist() for x in parts[0]] == [[0, 1], [4, 5], [8, 9]]
    assert [x.tolist() for x in parts[1]] == [[2, 3], [6, 7]]
    assert sum(arrived) == 10
    assert parts[0].batch_size == 2


def test_in_lockstep_all_have_equally_many_batches_of_a_stream() -> None:
    """Who has none in the last round computes on the first batch once more, which counts for nothing."""
    loader = DataLoader(Stream(), batch_size=4)  # three batches
    arrived: list[list[int]] = [[], []]
    parts = [
        StridedLoader(loader, rank, 2, arrived[rank].append, SecondPass(lambda: None), lambda: False, True)
        for rank in (0, 1)
    ]
    assert [x.tolist() for x in parts[0]] == [[0, 1, 2, 3], [8, 9]]
    assert [x.tolist() for x in parts[1]] == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert arrived == [[4, 2], [4, 0]]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        ([torch.zeros(5, 2), torch.zeros(3)], 5),
        ({"x": (torch.zeros(7),), "y": 1}, 7),
        (["one", "two"], 2),
        ({"text": ["one", "two", "three"]}, 3),
        ([1, 2, 3, 4], 4),
        (torch.tensor(3.0), 1),
        ([torch.zeros(4), torch.tensor(2)], 1),
        (object(), 1),
    ],
)
def test_the_samples_of_a_batch_are_counted_as_far_as_they_can_be_seen(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples
