"""The work of a run: batches of an epoch, dispensed to whoever is ready.

With equal fixed shards every protocol ends when the slowest worker has done its share. So the
default is one shared budget: batches are handed out in the epoch's order, epoch after epoch, and a
fast worker simply takes more of them. What a worker drew and did not push goes back and is handed
out first, so every position of an epoch is used exactly once although workers die.

A position is a place in the epoch's seeded order; every worker knows that order and needs only
numbers. With `equal`, rank r takes every size-th batch, beginning with the r-th.

In lockstep (`level`) all workers draw equally often in every epoch, so that epochs end together and no
round mixes two of them. Who would have nothing to do in an epoch's last round draws a batch of no
positions: it computes on a batch that counts for nothing, and the round is what one process would
make of the last, short batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import isclose, isnan
from typing import Any, Literal

import msgspec

from paceline.errors import ConfigError

ANYBODY = -1


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` positions of an epoch's order, beginning with `first`."""

    epoch: int
    first: int
    count: int

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + self.count

    def split(self, count: int) -> tuple[Batch, Batch]:
        """The first `count` positions, and the others."""
        taken = min(count, self.count)
        rest = Batch(self.epoch, self.first + taken, self.count - taken)
        return Batch(self.epoch, self.first, taken), rest

    def overlap(self, other: Batch) -> int:
        """How many positions both have."""
        if self.epoch != other.epoch:
            return 0
        return max(0, min(self.end, other.end) - max(self.first, other.first))


class Fingerprint(msgspec.Struct, frozen=True):
    """What tells a loader's data apart, as far as that is cheap: not every difference shows in it."""

    exact: str = ""
    """A digest of lengths, types, and the indices of subsets and samplers."""
    means: tuple[float, ...] = ()
    """Of some rows of its tensors."""

    def fits(self, other: Fingerprint) -> bool:
        """Whether the data may be the same; machines may compute means that differ in their last digits."""
        if self.exact != other.exact or len(self.means) != len(other.means):
            return False
        return all(map(_about_equal, self.means, other.means))


def _about_equal(a: float, b: float) -> bool:
    return isclose(a, b, rel_tol=1e-3, abs_tol=1e-9) or (isnan(a) and isnan(b))


def different_data(rank: int) -> str:
    """What to say when a rank has other data than rank 0."""
    return (
        f"ranks 0 and {rank} have different data: the samples of the loader's dataset, or the indices of a "
        "Subset or sampler. Positions are dispensed, so all ranks need the same data in the same order. Do "
        "not divide it by rank, and split with a seeded generator: "
        "random_split(data, sizes, generator=torch.Generator().manual_seed(0)). Data that only one rank has "
        "go into an iterable dataset, with --shards own."
    )


class Source(msgspec.Struct, frozen=True):
    """What a loader offers. Units are samples, or whole batches for a batch sampler of the user's."""

    units: int
    batch: int
    drop_last: bool = False
    whole: bool = False
    """Whether units are whole batches, of whatever size."""
    order: str = ""
    """What tells the states of the sampler's own generators apart; empty: it has none."""
    data: Fingerprint = Fingerprint()
    """What tells its dataset apart."""

    @property
    def samples(self) -> int | None:
        """Samples per epoch; None if they cannot be known."""
        if self.whole:
            return None
        return self.batches * self.batch if self.drop_last else self.units

    @property
    def batches(self) -> int:
        """Batches per epoch."""
        return self.units // self.batch if self.drop_last else -(-self.units // self.batch)

    def in_rounds(self, workers: int) -> Source:
        """The same with whole rounds only, if short batches are to be dropped: as one process with the
        batches of a round as one would."""
        rounds = self.batches // workers
        if not self.drop_last or rounds == 0:
            return self
        return msgspec.structs.replace(self, units=rounds * workers * self.batch)

    def step(self, units: int, workers: int) -> int:
        """How many steps one process with the batches of a round as one has taken after so many units."""
        epoch, usual = self.samples or self.units, self.batch * workers
        return units // epoch * -(-epoch // usual) + units % epoch // usual


class Budget:
    """Who works on what."""

    def __init__(
        self,
        source: Source,
        workers: int,
        shards: Literal["shared", "equal"] = "shared",
        level: bool = False,
    ) -> None:
        """`level`: everybody draws equally often in every epoch."""
        if source.batches < workers:
            raise ConfigError(
                f"the loader has {source.batches} batches per epoch for {workers} workers, so some would "
                "have nothing to do. Use fewer workers or a smaller batch size."
            )
        self.source = source.in_rounds(workers) if level else source
        self._level = level
        self._draws: dict[int, dict[int, int]] = {}
        """How often each worker has drawn, in the epochs that are not behind everybody."""
        self._rounds: dict[int, int] = {}
        """How often each has to at least: somebody may be ahead by batches that it has not stepped with."""
        self._equal = shards == "equal"
        self._live = dict.fromkeys(range(workers))
        self._opened = 0
        self._queues: dict[int, dict[int, deque[int]]] = {}
        self._epoch: dict[int, int] = {}
        self._returned: deque[Batch] = deque()
        self._drawn: dict[int, list[Batch]] = {}

    @property
    def even(self) -> bool:
        """Whether workers have equally many batches of an epoch, and not as many as they come for."""
        return self._equal or self._level

    @property
    def epoch(self) -> int:
        """The first epoch with work left in it."""
        places = [*self._queues, *(b.epoch for b in self._outstanding())]
        return min(places, default=self._opened)

    def draw(self, worker: int) -> Batch:
        """The worker's next batch: what somebody gave back of this epoch, else the next in order."""
        if worker not in self._live:
            self._live[worker] = None
            self._catch_up(worker)
        epoch, queue = self._share(worker)
        behind = self._behind(worker, epoch)
        if behind is not None and not self.has_returned(behind):
            batch = Batch(behind, 0, 0)
        elif self.has_returned(epoch):
            batch = self._returned.popleft()
        else:
            batch = self._batch(epoch, queue.popleft())
            self._close(epoch)
        self._drawn.setdefault(worker, []).append(batch)
        self._count(worker, batch.epoch)
        return batch

    def finish(self, worker: int, used: Iterable[Batch]) -> tuple[Batch, ...]:
        """The worker pushed the gradient of these batches, of all that it drew."""
        drawn = self._drawn.get(worker, [])
        done = tuple(batch for batch in dict.fromkeys(used) if batch in drawn)
        for batch in done:
            drawn.remove(batch)
        return done

    def give_back(self, worker: int) -> list[Batch]:
        """The worker is gone: what it drew and did not finish is to be dispensed again."""
        self._live.pop(worker, None)
        for draws in self._draws.values():
            draws.pop(worker, None)
        unfinished = list(self._drawn.pop(worker, ()))
        shares = [(epoch, queues.pop(worker, ())) for epoch, queues in self._queues.items()]
        rest = [self._batch(epoch, index) for epoch, share in shares for index in share]
        for epoch in list(self._queues):
            self._close(epoch)
        self._returned = self._in_order([*self._returned, *unfinished, *rest])
        return unfinished

    def has_returned(self, epoch: int) -> bool:
        """Whether work of this epoch or an earlier one lies unfinished by anybody."""
        return bool(self._returned) and self._returned[0].epoch <= epoch

    def holds(self, worker: int, epoch: int) -> bool:
        """Whether the worker has drawn work of this epoch or an earlier one and not finished it."""
        return any(batch.epoch <= epoch for batch in self._drawn.get(worker, ()))

    @property
    def returned(self) -> tuple[Batch, ...]:
        """What was given back and not dispensed again."""
        return tuple(self._returned)

    def state(self, unapplied: Iterable[Batch] = ()) -> dict[str, Any]:
        """Everything needed to go on: whatever is not finished, or finished in vain, counts as returned."""
        rest = [
            self._batch(epoch, index)
            for epoch, queues in self._queues.items()
            for queue in queues.values()
            for index in queue
        ]
        pending = self._in_order([*self._outstanding(), *rest, *unapplied])
        return {"opened": self._opened, "returned": msgspec.to_builtins(list(pending))}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, be it by a budget of another kind."""
        self._opened = state["opened"]
        self._returned = self._in_order(msgspec.convert(state["returned"], list[Batch]))

    def _in_order(self, work: Iterable[Batch]) -> deque[Batch]:
        """Work to dispense again, as it is going to be: no batch larger than the loader's."""
        pieces = deque[Batch]()
        for rest in sorted(work, key=place):
            while rest.count:
                piece, rest = rest.split(self.source.batch)
                pieces.append(piece)
        return pieces

    def _count(self, worker: int, epoch: int) -> None:
        """Note a draw; epochs that everybody is done with are forgotten."""
        if self._level:
            draws = self._draws.setdefault(epoch, {})
            draws[worker] = draws.get(worker, 0) + 1
            for old in [e for e in self._draws if e < epoch - 1]:
                del self._draws[old]
                self._rounds.pop(old, None)

    def _behind(self, worker: int, epoch: int) -> int | None:
        """The first epoch before this one in which the worker has drawn less often than another does."""
        for old in sorted(e for e in self._draws if e < epoch):
            draws = self._draws[old]
            most = max([self._rounds.get(old, 0), *draws.values()])
            if draws.get(worker, 0) < most:
                return old
        return None

    def _catch_up(self, worker: int) -> None:
        """Somebody comes late: it need not draw what the others have, and they have less to do."""
        self._rounds.clear()
        for draws in self._draws.values():
            draws[worker] = max(max(draws.values(), default=0) - 1, 0)

    def _outstanding(self) -> list[Batch]:
        return [*self._returned, *(b for drawn in self._drawn.values() for b in drawn)]

    def _share(self, worker: int) -> tuple[int, deque[int]]:
        """What the worker has to take from, in the first epoch where there is something."""
        key = worker if self._equal else ANYBODY
        epoch = self._epoch.get(key, 0)
        while not (queue := self._queue(epoch, key)):
            epoch += 1
        self._epoch[key] = epoch
        return epoch, queue

    def _close(self, epoch: int) -> None:
        if not any(self._queues[epoch].values()):
            del self._queues[epoch]

    def _queue(self, epoch: int, key: int) -> deque[int] | None:
        if epoch >= self._opened:
            self._queues[epoch] = self._deal()
            self._opened = epoch + 1
            self._rounds[epoch] = -(-self.source.batches // len(self._live)) if self._level else 0
        return self._queues.get(epoch, {}).get(key)

    def _deal(self) -> dict[int, deque[int]]:
        """A new epoch's batches: one pile for all, or one for each of the living."""
        indices = range(self.source.batches)
        if not self._equal:
            return {ANYBODY: deque(indices)}
        living = sorted(self._live)
        return {rank: deque(indices[i :: len(living)]) for i, rank in enumerate(living)}

    def _batch(self, epoch: int, index: int) -> Batch:
        first = index * self.source.batch
        return Batch(epoch, first, min(self.source.batch, self.source.units - first))


def deal_again(budget: Budget) -> None:
    """After a resume: what is left goes to whom it was dealt to, not to whoever comes first."""
    rest, opened = set(budget._returned), budget._opened
    budget._returned.clear()
    for budget._opened in range(opened):
        shares, epoch = budget._deal(), budget._opened
        left = {rank: deque(i for i in q if budget._batch(epoch, i) in rest) for rank, q in shares.items()}
        if any(left.values()):
            budget._queues[epoch] = left
    budget._opened = opened


def place(batch: Batch) -> tuple[int, int]:
    """Where a batch stands in the order of all epochs."""
    return batch.epoch, batch.first
