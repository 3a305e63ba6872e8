"""A worker's loader: the user's own, drawing its batches from the run's budget.

Every worker knows the epoch's order, because it is drawn from the user's own sampler under a seed
of run and epoch; the store only dispenses positions in it. An iterable dataset has no positions:
there each worker takes every size-th batch of the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from paceline.errors import ConfigError
from paceline.runtime.checkpoints.random_state import digest
from paceline.runtime.worker.data.sample_order import SampleOrders
from paceline.runtime.worker.data.second_pass import SecondPass
from paceline.runtime.worker.link import StoreLink
from paceline.store.work.budget import Batch, Source
from paceline.store.work.chunks import Injection


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
        self._broken_off = False
        """Whether a pass has begun this epoch and not come to its end."""
        self._handed: deque[tuple[Batch, int | None]] = deque()
        self._passing: set[int] = set()
        """Passes over the prepared loader that are under way: they alone may take from here."""
        self._pass = 0

    def __len__(self) -> int:
        return self._length or -(-self._source.batches // self._link.config.workers)

    def __iter__(self) -> Iterator[Any]:
        if not self._passing:
            raise ConfigError(
                "another loader takes its batches from the sampler of the one that pace.prepare gave back, "
                "so the run cannot tell which batches a step has used. Wrap the loader first, and call "
                "pace.prepare last: `model, optimizer, loader = pace.prepare(*accelerator.prepare(model, "
                "optimizer, loader))`."
            )
        if self._passes_done > 0:  # a resumed script repeats its loop: these epochs are behind us
            self._passes_done -= 1
            return
        batch, epoch = self._first()
        while batch is not None:
            self._broken_off = True
            # A batch of no positions: this round has nothing for us. We compute, but it counts for nothing.
            count = batch.count or min(self._source.batch, self._source.units)
            order = self._orders[batch.epoch][batch.first : batch.first + count]
            indices = order[0] if self._whole_batches else order
            known = len(indices) if isinstance(indices, Sized) else None
            self._handed.append((batch, known if batch.count else 0))
            self._about_to(batch)
            alone = self._injection is None or not batch.count
            yield indices if alone else self._filled_up(batch, indices)
            batch = self._link.next_batch(epoch)
        # Not reached by a loop that breaks off: the next one goes on here.
        self._epoch, self._broken_off = epoch + 1, False

    def _first(self) -> tuple[Batch | None, int]:
        """The first batch of a pass, and its epoch. One pass, one epoch, for every worker: for a slow one it
        may be over already. A loop that broke off with the last batch of an epoch goes on with the next."""
        batch = self._link.next_batch(self._epoch)
        if batch is None and self._broken_off and not self._link.enough:
            self._epoch, self._broken_off = self._epoch + 1, False
            batch = self._link.next_batch(self._epoch)
        return batch, self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the run tells the user's own sampler the epoch before it draws that epoch's order."""

    def _filled_up(self, batch: Batch, indices: list[Any]) -> list[Any]:
        """A batch and the samples that others share; these are theirs, and not counted."""
        order, injection = self._orders[batch.epoch], self._injection
        assert injection is not None
        shared = [order[first : first + count] for first, count in injection.beside(batch)]
        return [*indices, *(index for samples in shared for index in samples)]

    def begin_pass(self) -> int:
        """A pass over the prepared loader begins; its number."""
        self._pass += 1
        self._passing.add(self._pass)
        return self._pass

    def end_pass(self, number: int) -> None:
        """It is over, or was broken off."""
        self._passing.discard(number)

    def arrived(self) -> tuple[Batch, int | None]:
        """The batch that reaches the script now, and its samples, as far as they are known."""
        if not self._handed:
            raise _not_one_by_one("more")
        return self._handed.popleft()

    def check_all_arrived(self) -> None:
        """A pass is over: every batch has to have reached the script."""
        if self._handed:
            raise _not_one_by_one("fewer")

    def take_back(self) -> None:
        """Keep for the next loop what was loaded ahead for one that broke off."""
        while self._handed:
            batch = self._handed.pop()[0]
            self._link.put_back(batch)
            self._epoch = min(self._epoch, batch.epoch)


class BatchLookup:
    """Batches of indices that are looked up one by one, when it is their turn."""

    def __init__(self, numbers: range, batch: Callable[[int], Any]) -> None:
        self._numbers, self._batch = numbers, batch

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Any]:
        return map(self._batch, self._numbers)


def with_batches(loader: DataLoader[Any], batches: Any, kind: type[DataLoader[Any]] | None = None) -> Any:
    """The user's loader once more, with other batches: of its own class, or of a `kind` made from that.

    A copy, and not a new DataLoader: a class of the user's own has an `__iter__` and attributes of its own.
    One that passes for a DataLoader and takes its batches from another within it (accelerate's) has that
    one replaced.
    """
    other = object.__new__(kind or type(loader))
    named = "sampler" if loader.batch_sampler is None else "batch_sampler"
    within = {} if named in vars(loader) else _loaders_within(loader)
    changed = {name: with_batches(each, batches) for name, each in within.items()}
    vars(other).update(vars(loader) | (changed or {named: batches, "_iterator": None}))
    return other


def _loaders_within(loader: DataLoader[Any]) -> dict[str, DataLoader[Any]]:
    return {name: each for name, each in vars(loader).items() if isinstance(each, DataLoader)}


def paced_loader(
    loader: DataLoader[Any],
    dispensed: Dispensed,
    begins: Callable[[], None],
    arrived: Callable[[int, Batch], None],
    passed: Callable[[], None],
    repeats: SecondPass,
) -> Any:
    """The user's loader with batches from the run. `arrived` is told of every one that reaches the script,
    `begins` and `passed` of the beginning and the end of every pass."""
    kind = type(loader)
    paced = type(kind.__name__, (PacedLoader, kind), {"__module__": kind.__module__})
    other = with_batches(loader, dispensed, paced)
    other._told = begins, arrived, passed, repeats
    return other


class PacedLoader(DataLoader[Any]):
    """What `paced_loader` adds to the class of the user's loader."""

    _told: tuple[Callable[[], None], Callable[[int, Batch], None], Callable[[], None], SecondPass]

    @property
    def _dispensed(self) -> Dispensed:
        ours = self.sampler if self.batch_sampler is None else self.batch_sampler
        assert isinstance(ours, Dispensed)
        return ours

    def __len__(self) -> int:
        return len(self._dispensed)

    def __iter__(self) -> Any:
        (begins, arrived, passed, repeats), dispensed = self._told, self._dispensed
        dispensed.take_back()
        begins()
        number = dispensed.begin_pass()
        try:
            for data in super().__iter__():
                batch, samples = dispensed.arrived()
                arrived(count_samples(data) if samples is None else samples, batch)
                yield from repeats.through(data)
        finally:
            dispensed.end_pass(number)
        dispensed.check_all_arrived()
        passed()


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
        level: bool = False,
        ends: Callable[[], None] = lambda: None,
    ) -> None:
        """`arrived` is told of every batch; when `stopped`, there are no more of them. `level`: all have
        equally many in a pass, so that in lockstep no round mixes two. `ends` is told of its end."""
        self._loader, self._rank, self._size, self._level, self._ends = loader, rank, size, level, ends
        self._arrived, self._repeats, self._stopped = arrived, repeats, stopped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(range(0 if self._level else self._rank, len(self._loader), self._size))

    def __iter__(self) -> Iterator[Any]:
        yield from self._mine()
        self._ends()

    def _mine(self) -> Iterator[Any]:
        number, first = -1, None
        for number, batch in enumerate(self._loader):
            if self._level and number == 0:
                first = batch
            if number % self._size != self._rank:
                continue
            if self._stopped():
                return
            self._arrived(count_samples(batch))
            yield from self._repeats.through(batch)
        if first is not None and number % self._size < self._rank and not self._stopped():
            self._arrived(0)  # the last round has nothing for us: we compute, but it counts for nothing
            yield from self._repeats.through(first)


def source_of(loader: DataLoader[Any]) -> tuple[Source | None, Any, bool]:
    """What a loader offers, its sampler, and whether that sampler gives whole batches."""
    if isinstance(loader.dataset, IterableDataset):
        return None, None, False
    batches = loader.batch_sampler
    refuse_shares(batches)
    if type(batches) is BatchSampler:
        units = length_of(batches.sampler)
        order = digest(batches.sampler)
        return Source(units, batches.batch_size, batches.drop_last, order=order), batches.sampler, False
    whole = (
        loader.sampler if batches is None else batches
    )  # batch_size=None: what the dataset has are batches
    return Source(length_of(whole), 1, whole=True, order=digest(whole)), whole, True


def length_of(sampler: Any) -> int:
    """How much a sampler gives in an epoch."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        without = type(getattr(sampler, "sampler", sampler)).__name__
        raise ConfigError(
            f"the loader's sampler ({without}) has no length, so the work of an epoch is unknown. Give it a "
            "__len__ with its number of indices or batches, or put the data into an iterable dataset."
        ) from None


def refuse_shares(batches: Any) -> None:
    """Refuse a sampler that has divided the data already."""
    if isinstance(getattr(batches, "sampler", batches), DistributedSampler):
        raise ConfigError(
            "the loader has a DistributedSampler, which gives every worker its own share; Paceline dispenses "
            "batches by itself. Use shuffle=True instead, and --shards equal for equal shares."
        )


def _not_one_by_one(much: str) -> ConfigError:
    return ConfigError(
        f"the loader's own __iter__ gives the script {much} items than its sampler has batches, so the run "
        "cannot count them. Let it yield one item per batch, or split and join batches in the loop."
    )


def count_samples(batch: Any) -> int:
    """The batch's size, as far as it can be seen."""
    size = 1
    while isinstance(batch, (list, tuple, dict)) and batch:  # a union is made anew each time
        size = len(batch)
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        for part in parts:
            if isinstance(part, Tensor) and part.ndim == 0:
                return 1  # a label by itself: one sample, not stacked
        batch = parts[0]
    if isinstance(batch, Tensor) and batch.ndim:
        return batch.shape[0]
    if isinstance(batch, str | bytes | int | float):  # such things are not stacked: they come as a list
        return size
    return len(batch) if hasattr(batch, "__len__") and getattr(batch, "ndim", 1) > 0 else 1
