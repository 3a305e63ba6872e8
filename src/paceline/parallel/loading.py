"""The batches of a run on a mesh: every copy of the model has its own, and all workers of a copy the same.

The order of an epoch is drawn from the user's own sampler under a seed of run and epoch, so all workers know
it; a loader with a `generator` of its own keeps the order it has alone. Copies take batches in turn; the
samples of a last, incomplete round are spread over all copies, so that every sample is used by exactly one of
them. Fewer samples than copies are left out of that epoch, and so is an incomplete round under `drop_last`.
A pass that a script breaks off is not lost: the next one goes on with what is left of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from paceline.errors import ConfigError
from paceline.runtime.worker.data.loader import BatchLookup, length_of, refuse_shares, with_batches
from paceline.runtime.worker.data.pass_log import PassLog
from paceline.runtime.worker.data.sample_order import BatchOrders
from paceline.store.work.due import LoaderPasses

Indices = list[Any]


class DealtRounds:
    """An epoch in rounds of one batch for each copy. Batches are looked up when they are asked for."""

    def __init__(self, orders: BatchOrders, epoch: int, copies: int, drop_last: bool = False) -> None:
        self._orders, self._epoch, self._copies = orders, epoch, copies
        self._whole, left = divmod(len(orders), copies)
        self._rest = range(self._whole * copies, len(orders))
        spread = bool(left) and not drop_last
        self._left = sum(orders.samples(epoch, each) for each in self._rest) if spread else 0

    def __len__(self) -> int:
        return self._whole + (self._left >= self._copies)

    def samples(self, rounds: int) -> int:
        """How many the first rounds have, of all copies."""
        left = self._left if rounds > self._whole else 0
        return left + self._orders.samples_before(self._epoch, min(rounds, self._whole) * self._copies)

    def __getitem__(self, number: int) -> list[Indices]:
        if number < self._whole:
            first = number * self._copies
            return [self._orders.batch(self._epoch, first + copy) for copy in range(self._copies)]
        left = [index for each in self._rest for index in self._orders.batch(self._epoch, each)]
        size, more = divmod(len(left), self._copies)
        bounds = [at * size + min(at, more) for at in range(self._copies + 1)]
        return [left[start:end] for start, end in pairwise(bounds)]


AnyRounds = DealtRounds | list[list[Indices]]


class MeshLoader:
    """A mesh's loader. One pass over it is one epoch, or what a pass that was broken off has left of it.

    Where batches are not loaded (later stages of a pipeline), None stands in the place of each.
    """

    def __init__(self, loader: Any, copy: int, copies: int, seed: int, *, loads: bool = True) -> None:
        self._loader, self._copy, self._copies, self._loads = loader, copy, copies, loads
        self.about_to: Callable[[], bool] = lambda: True
        """Asked before every batch; False: training was ended for all."""
        self.say: Callable[[str], None] = lambda text: None
        """Told once if the script does not do what it may seem to."""
        self._open(loader, seed)
        self.epoch, self.rounds = 0, 0
        """Where it stands: rounds of the epoch that were handed out."""
        self._skip = (0, 0)
        self._passes = 0
        self._log = PassLog()
        self.unused = 0
        """Rounds that were handed out since the last step."""
        self._behind = 0
        """Samples that an earlier run did of the epoch in which this one goes on."""
        self._told_broken_off = False
        self.repeats = False
        """Whether a resumed script only repeats what was done before."""
        self.samples = 0
        """Of all copies, in the round that was handed out last."""
        self.taken = (0, 0)
        """Samples that were handed out so far, in this process: this copy's, and all copies'."""
        self.over = False
        """Whether training was ended for all."""

    def _open(self, loader: Any, seed: int) -> None:
        check_loader(loader)
        batches = length_of(loader.batch_sampler)
        self._orders = BatchOrders(loader.batch_sampler, batches, seed, loader, lambda text: self.say(text))
        rounds = self._rounds(0)
        self._turns, self._whole = len(rounds), _samples(rounds, len(rounds))
        if not self._turns:
            raise ConfigError(
                f"the loader's {len(loader.dataset)} samples (batch_size {loader.batch_size}) are too few "
                f"for one update of {self._copies} copies. Use fewer copies, or smaller batches."
            )

    def __len__(self) -> int:
        return self._turns

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self._loader.dataset

    @property
    def sampler(self) -> Any:
        """The user's. The run tells it the epoch; telling it once more changes nothing."""
        return self._loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """The user's."""
        return self._loader.batch_sampler

    @property
    def per_epoch(self) -> int:
        """Samples."""
        return len(self._loader.dataset)

    @property
    def due(self) -> int:
        """Samples that the passes begun by the script are to train on, less what an earlier run did."""
        return max(0, (self._passes - self._skip[0]) * self._whole - self._behind)

    def told_passes(self) -> LoaderPasses:
        """The passes over it, for the run's books."""
        return self._log.told(self._turns, self.unused)

    def resume(self, epoch: int, rounds: int) -> None:
        """So much is behind us: epochs that a script runs through again give nothing."""
        self._skip, self.repeats = (epoch, rounds), True

    def __iter__(self) -> Iterator[Any]:
        if self.over or not self._begin_pass():
            return
        epoch, done, number = self.epoch, self.rounds, self._passes
        rounds = self._rounds(epoch)
        if epoch == self._skip[0]:
            self._behind = _samples(rounds, self._skip[1])
        coming = range(done, len(rounds))
        for at, batch in zip(coming, self._loaded(rounds, coming), strict=True):
            dealt = rounds[at]
            self._check_alone(number)
            self.repeats = False
            if not self.about_to():
                self.over = True
                return
            self.samples = sum(map(len, dealt))
            self.taken = self.taken[0] + len(dealt[self._copy]), self.taken[1] + self.samples
            self.rounds += 1
            self._log.arrived()
            self.unused += 1
            yield batch
            if self.over:
                return
        self._check_alone(number)
        self._log.ends()
        self.epoch, self.rounds = epoch + 1, 0

    def _begin_pass(self) -> bool:
        """Find the place that a pass begins at. False: a resumed script repeats what is behind it."""
        self._passes += 1
        self._log.begins()
        self._mention_broken_off()
        if self.rounds >= self._turns:  # broken off after the last batch: nothing is left of the epoch
            self.epoch, self.rounds = self.epoch + 1, 0
        if self.epoch < self._skip[0]:
            self.epoch += 1
            return False
        if self.epoch == self._skip[0]:
            self.rounds = max(self.rounds, self._skip[1])
        return True

    def _mention_broken_off(self) -> None:
        if 0 < self.rounds < self._turns and not self._told_broken_off:
            self._told_broken_off = True
            self.say(
                f"the script broke off a pass over the loader after {self.rounds} of {self._turns} batches "
                "and started another. The new pass continues with the rest of the epoch, whereas plain "
                "PyTorch would start the epoch again; --resume counts only whole epochs"
            )

    def _check_alone(self, number: int) -> None:
        """Refuse a pass that goes on after another one has begun: both would take the same batches."""
        if number != self._passes:
            raise ConfigError(
                "the script goes on with a pass over the loader after it has begun another. A mesh deals an "
                "epoch out once: end one pass before the next, or use a second loader that is not prepared."
            )

    def _rounds(self, epoch: int) -> AnyRounds:
        """What each copy gets, round by round."""
        return DealtRounds(self._orders, epoch, self._copies, self._loader.drop_last)

    def _loaded(self, rounds: AnyRounds, coming: range) -> Iterator[Any]:
        if not self._loads:
            yield from (None for _ in coming)
            return
        yield from with_batches(self._loader, BatchLookup(coming, lambda at: rounds[at][self._copy]))


def _samples(rounds: AnyRounds, count: int) -> int:
    """How many the first rounds have, of all copies."""
    if isinstance(rounds, DealtRounds):
        return rounds.samples(count)
    return sum(len(indices) for dealt in rounds[:count] for indices in dealt)


def check_loader(loader: Any) -> None:
    """Something whose order all workers can know."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "a mesh needs a DataLoader over a dataset with a length, whose order all workers know, got "
            f"{type(loader).__name__}. Put the data into a map-style dataset."
        )
    if loader.batch_sampler is None:
        raise ConfigError("a mesh needs a loader that makes batches: give it a batch_size.")
    refuse_shares(loader.batch_sampler)
