"""A worker's loader: the user's own, drawing its batches from the run's budget.

Every worker knows the epoch's order, because it is drawn from the user's own sampler under a seed
of run and epoch; the store only dispenses positions in it. An iterable dataset has no positions:
there each worker takes every size-th batch of the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from paceline.errors import ConfigError
from paceline.runtime.checkpoints.random_state import digest
from paceline.runtime.worker.data.sample_order import SampleOrders
from paceline.runtime.worker.data.second_pass import SecondPass
from paceline.runtime.worker.link import StoreLink
from paceline.store.work.budget import Batch, Source
from paceline.store.work.chunks import Injection

COPIED = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


class Dispensed(Sampler[Any]):
    """A batch sampler that asks the store. One pass over it is one epoch."""

    def __init__(
        self,
        link: StoreLink,
        orders: SampleOrders,
        source: Source,
        whole_batches: bool,
        first: int,
        injection: Injection | None = None,
        length: int | None = None,
        about_to: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        """`first`: the epoch to begin with; `length`: how many batches this worker gets per epoch; `about_to`
        is told of a batch before it is loaded."""
        self._about_to = about_to
        self._injection = injection
        self._link = link
        self._orders = orders
        self._source = source
        self._length = length
        self._whole_batches = whole_batches
        self._passes_done = first
        self._epoch = first
        self._handed: deque[tuple[Batch, int]] = deque()

    def __len__(self) -> int:
        return self._length or -(-self._source.batches // self._link.config.workers)

    def __iter__(self) -> Iterator[Any]:
        if self._passes_done > 0:  # a resumed script repeats its loop: these epochs are behind us
            self._passes_done -= 1
            return
        epoch = self._epoch  # one pass, one epoch, for every worker: for a slow one it may be over already
        while (batch := self._link.next_batch(epoch)) is not None:
            # A batch of no positions: this round has nothing for us. We compute, but it counts for nothing.
            count = batch.count or min(self._source.batch, self._source.units)
            order = self._orders[batch.epoch][batch.first : batch.first + count]
            indices = order[0] if self._whole_batches else order
            self._handed.append((batch, len(indices) if batch.count else 0))
            self._about_to(batch)
            alone = self._injection is None or not batch.count
            yield indices if alone else self._filled_up(batch, indices)
        self._epoch = epoch + 1  # not reached by a loop that breaks off: the next one goes on here

    def _filled_up(self, batch: Batch, indices: list[Any]) -> list[Any]:
        """A batch and the samples that others share; these are theirs, and not counted."""
        order, injection = self._orders[batch.epoch], self._injection
        assert injection is not None
        shared = [order[first : first + count] for first, count in injection.beside(batch)]
        return [*indices, *(index for samples in shared for index in samples)]

    def arrived(self) -> tuple[Batch, int]:
        """The batch that reaches the script now, and its samples."""
        return self._handed.popleft()

    def take_back(self) -> None:
        """Keep for the next loop what was loaded ahead for one that broke off."""
        while self._handed:
            self._link.put_back(self._handed.pop()[0])


class PacedLoader(DataLoader[Any]):
    """The user's loader with another batch sampler, telling when a batch reaches the script."""

    def __init__(
        self,
        loader: DataLoader[Any],
        dispensed: Dispensed,
        arrived: Callable[[int, Batch], None],
        passed: Callable[[], None],
        repeats: SecondPass,
    ) -> None:
        """`arrived` is told of every batch, `passed` of every end of a pass."""
        super().__init__(loader.dataset, batch_sampler=dispensed, **{k: getattr(loader, k) for k in COPIED})
        self.__dict__["batch_size"] = loader.batch_size
        self._dispensed = dispensed
        self._arrived = arrived
        self._passed = passed
        self._repeats = repeats

    def __iter__(self) -> Any:
        self._dispensed.take_back()
        for data in super().__iter__():
            batch, samples = self._dispensed.arrived()
            self._arrived(samples, batch)
            yield from self._repeats.through(data)
        self._passed()


class StridedLoader:
    """Every size-th batch of a stream."""

    def __init__(
        self,
        loader: DataLoader[Any],
        rank: int,
        size: int,
        arrived: Callable[[int], None],
        repeats: SecondPass,
        stopped: Callable[[], bool],
    ) -> None:
        """`arrived` is told of every batch; when `stopped`, there are no more of them."""
        self._loader, self._rank, self._size = loader, rank, size
        self._arrived, self._repeats, self._stopped = arrived, repeats, stopped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(range(self._rank, len(self._loader), self._size))

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(self._loader, self._rank, None, self._size):
            if self._stopped():
                return
            self._arrived(count_samples(batch))
            yield from self._repeats.through(batch)


def source_of(loader: DataLoader[Any]) -> tuple[Source | None, Any, bool]:
    """What a loader offers, its sampler, and whether that sampler gives whole batches."""
    if isinstance(loader.dataset, IterableDataset):
        return None, None, False
    batches = loader.batch_sampler
    if isinstance(getattr(batches, "sampler", batches), DistributedSampler):
        raise ConfigError(
            "the loader has a DistributedSampler, which gives every worker its own share; Paceline dispenses "
            "batches by itself. Use shuffle=True instead, and --shards equal for equal shares."
        )
    if type(batches) is BatchSampler:
        units = len(batches.sampler)  # type: ignore[arg-type]
        order = digest(batches.sampler)
        return Source(units, batches.batch_size, batches.drop_last, order=order), batches.sampler, False
    if batches is None:
        raise ConfigError("a loader with batch_size=None yields no batches. Give it a batch size.")
    return Source(len(batches), 1, whole=True, order=digest(batches)), batches, True  # type: ignore[arg-type]


def count_samples(batch: Any) -> int:
    """The batch's size, as far as it can be seen."""
    size = 1
    while isinstance(batch, list | tuple | dict) and batch:
        size = len(batch)
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    if isinstance(batch, str | bytes | int | float):  # such things are not stacked: they come as a list
        return size
    return len(batch) if hasattr(batch, "__len__") and getattr(batch, "ndim", 1) > 0 else 1
