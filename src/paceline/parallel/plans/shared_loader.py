"""The script's loader, as the workers of a plan need it: equally many batches for all, in lockstep.

Every epoch's order is what the loader's own sampler gives under a seed that all share; a loader with a
`generator` of its own keeps the order it has alone. A step takes the next workers x batch
samples; under OSDP each rank has its own part of them, under HAP every rank has all (the program cuts
them). What is left over at the end of an epoch is too little for a step and is not used; that is said
once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from paceline.errors import ConfigError
from paceline.runtime.worker.data.loader import BatchLookup, with_batches
from paceline.runtime.worker.data.pass_log import PassLog
from paceline.runtime.worker.data.sample_order import SampleOrders
from paceline.store.work.due import LoaderPasses


class SharedLoader:
    """An iterable over this rank's batches."""

    def __init__(
        self,
        loader: DataLoader[Any],
        batch: int,
        rank: int,
        size: int,
        seed: int,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`batch`: samples of this rank's batches; `size`: how many ranks have different ones; `say` is told
        if drawing an epoch's order takes long."""
        _check(loader)
        self._loader, self._batch, self._rank, self._size = loader, batch, rank, size
        self._epoch = 0
        self._log = PassLog()
        self.unused = 0
        """Batches that were handed out since the last step."""
        self.on_batch: Callable[[], None] = lambda: None
        """Told of every batch."""
        self.dataset, self.batch_size = loader.dataset, batch
        self.samples = len(loader.sampler)  # type: ignore[arg-type]
        self._orders = SampleOrders(loader.sampler, self.samples, seed, loader=loader, say=say)
        if len(self) == 0:
            raise ConfigError(
                f"the data has {self.samples} samples, too few for one step of {size} x {batch}. Use a "
                "smaller batch or fewer workers."
            )

    def __len__(self) -> int:
        return self.samples // (self._batch * self._size)

    @property
    def left_over(self) -> int:
        """Samples of every epoch that are not used."""
        return self.samples - len(self) * self._batch * self._size

    @property
    def due(self) -> int:
        """Samples, of all ranks, that the passes begun by the script are to train on."""
        return self._epoch * len(self) * self._batch * self._size

    def told_passes(self) -> LoaderPasses:
        """The passes over it, for the run's result."""
        return self._log.told(len(self), self.unused)

    def used(self) -> int:
        """A step uses what was handed out since the last one: how many samples that is, of all ranks."""
        batches, self.unused = self.unused, 0
        return batches * self._batch * self._size

    def __iter__(self) -> Iterator[Any]:
        order = self._orders[self._epoch]
        self._epoch += 1
        self._log.begins()
        first, step = self._rank * self._batch, self._batch * self._size
        firsts = range(first, first + len(self) * step, step)
        mine = BatchLookup(firsts, lambda at: order[at : at + self._batch])
        for batch in with_batches(self._loader, mine):
            self.on_batch()
            self._log.arrived()
            self.unused += 1
            yield batch
        self._log.ends()


def _check(loader: DataLoader[Any]) -> None:
    plain = isinstance(loader.sampler, SequentialSampler | RandomSampler) and loader.batch_size is not None
    if isinstance(loader.dataset, IterableDataset) or not plain:
        raise ConfigError(
            "a plan needs a loader over a map-style dataset with its own batches, shuffled or in order; this "
            f"one has {type(loader.dataset).__name__} and {type(loader.sampler).__name__}."
        )
