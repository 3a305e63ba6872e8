"""The work of a run: batches of an epoch, dispensed to whoever is ready.

With equal fixed shards every protocol ends when the slowest worker has done its share. So the
default is one shared budget: batches are handed out in the epoch's order, epoch after epoch, and a
fast worker simply takes more of them. What a worker drew and did not push goes back and is handed
out first, so every position of an epoch is used exactly once although workers die.

A position is a place in the epoch's seeded order; every worker knows that order and needs only
numbers. With `equal`, rank r takes every size-th batch, beginning with the r-th. An epoch is dealt a
section at a time, so that a sampler of any length costs neither time nor memory here.

In lockstep (`level`) all workers draw equally often in every epoch, so that epochs end together and no
round mixes two of them. Who would have nothing to do in an epoch's last round draws a batch of no
positions: it computes on a batch that counts for nothing, and the round is what one process would
make of the last, short batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from math import isclose, isnan
from typing import Any, Literal

import msgspec

from paceline.errors import ConfigError

ANYBODY = -1
SECTION = 4096
"""Batches of an epoch that are dealt at a time, so that an epoch of any length takes little memory."""


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
        self._dealt = self._turns
        """How many turns of the last opened epoch are dealt."""
        self._only: dict[int, list[Batch]] = {}
        """What a resumed run has left of epochs that it deals again."""
        self._queues: dict[int, dict[int, deque[int]]] = {}
        self._epoch: dict[int, int] = {}
        self._returned: deque[Batch] = deque()
        """In order; a stretch may be many batches long."""
        self._drawn: dict[int, list[Batch]] = {}

    @property
    def even(self) -> bool:
        """Whether workers have equally many batches of an epoch, and not as many as they come for."""
        return self._equal or self._level

    @property
    def epoch(self) -> int:
        """The first epoch with work left in it."""
        places = [*self._queues, *(b.epoch for b in self._outstanding())]
        if self._dealt < self._turns:
            places.append(self._opened - 1)
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
            batch, rest = self._returned.popleft().split(self.source.batch)
            if rest.count:
                self._returned.appendleft(rest)
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
        pending = self._in_order([*self._outstanding(), *rest, *self._undealt(), *unapplied])
        opened = max([self._opened, *(epoch + 1 for epoch in self._only)])
        return {"opened": opened, "returned": msgspec.to_builtins(list(pending))}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, be it by a budget of another kind."""
        self._opened = state["opened"]
        self._returned = self._in_order(msgspec.convert(state["returned"], list[Batch]))

    def _in_order(self, work: Iterable[Batch]) -> deque[Batch]:
        """Work to dispense again, as it is going to be cut; stretches that touch are joined if that does not
        change where batches begin."""
        stretches = deque[Batch]()
        for batch in sorted(work, key=place):
            last = stretches[-1] if stretches else None
            touch = last is not None and (last.epoch, last.end) == (batch.epoch, batch.first)
            if last is not None and touch and last.count % self.source.batch == 0:
                batch = Batch(batch.epoch, last.first, stretches.pop().count + batch.count)
            if batch.count:
                stretches.append(batch)
        return stretches

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
            self._opened, self._dealt = epoch + 1, 0
            whole = self._level and epoch not in self._only
            self._rounds[epoch] = -(-self.source.batches // len(self._live)) if whole else 0
        while not (queue := self._queues.get(epoch, {}).get(key)) and not self._all_dealt(epoch):
            self._deal_section(epoch)
        return queue

    def _all_dealt(self, epoch: int) -> bool:
        return epoch < self._opened - 1 or self._dealt >= self._turns

    @property
    def _turns(self) -> int:
        """How many steps an epoch is dealt in; a section is some of them."""
        return self.source.batches

    @property
    def _section(self) -> int:
        return SECTION

    def _deal_section(self, epoch: int) -> None:
        """Deal some more of the epoch that was opened last."""
        start, self._dealt = self._dealt, min(self._dealt + self._section, self._turns)
        only = self._only.get(epoch)
        parts = self._stretches(epoch, start, self._dealt)
        if only is None or any(_touches(only, part) for part in parts):
            for key, indices in self._deal(epoch, start, self._dealt).items():
                left = [i for i in indices if only is None or _touches(only, self._batch(epoch, i))]
                if left:
                    self._queues.setdefault(epoch, {}).setdefault(key, deque()).extend(left)
        if self._dealt >= self._turns:
            self._only.pop(epoch, None)

    def _deal(self, epoch: int, start: int, stop: int) -> dict[int, Sequence[int]]:
        """These turns of an epoch: one pile for all, or one for each of the living."""
        if not self._equal:
            return {ANYBODY: range(start, stop)}
        living = sorted(self._live)
        return {rank: in_turn(start, stop, i, len(living)) for i, rank in enumerate(living)}

    def _undealt(self) -> list[Batch]:
        """What is not dealt yet of epochs that are open, or that a resumed run has to open again."""
        work = [batch for epoch, rest in self._only.items() if epoch >= self._opened for batch in rest]
        epoch = self._opened - 1
        if self._dealt < self._turns:
            rest = self._stretches(epoch, self._dealt, self._turns)
            only = self._only.get(epoch)
            work += rest if only is None else [part for each in rest for part in _within(each, only)]
        return work

    def _stretches(self, epoch: int, start: int, stop: int) -> list[Batch]:
        """What is dealt in these turns."""
        return [self._stretch(epoch, start, stop)]

    def _stretch(self, epoch: int, start: int, stop: int) -> Batch:
        """Batches as one piece of work."""
        first = start * self.source.batch
        return Batch(epoch, first, max(0, min(stop * self.source.batch, self.source.units) - first))

    def _batch(self, epoch: int, index: int) -> Batch:
        return self._stretch(epoch, index, index + 1)

    def _deal_again(self) -> None:
        """After a resume: what is left goes to whom it was dealt to, not to whoever comes first."""
        rest, self._returned = self._returned, deque()
        for stretch in rest:
            end = min(stretch.end, self.source.batches * self.source.batch)
            if stretch.first % self.source.batch or (end % self.source.batch and end != self.source.units):
                self._returned.append(stretch)  # cut for a run with batches of other sizes
            else:
                self._only.setdefault(stretch.epoch, []).append(stretch)
        missing = range(min(self._only, default=self._opened), self._opened)
        for epoch in missing:
            self._only.setdefault(epoch, [])
        self._opened, self._dealt = self._opened - len(missing), self._turns


def in_turn(start: int, stop: int, turn: int, size: int) -> range:
    """Of these numbers, every size-th; those that leave `turn` when divided by it."""
    return range(start + (turn - start) % size, stop, size)


def _touches(stretches: list[Batch], batch: Batch) -> bool:
    """Whether some of a batch lies in stretches of its epoch, which are in order."""
    at = bisect_left(stretches, batch.end, key=lambda stretch: stretch.first) - 1
    return at >= 0 and stretches[at].end > batch.first


def _within(batch: Batch, stretches: Iterable[Batch]) -> list[Batch]:
    """The parts of a batch that lie in stretches of its epoch."""
    found = [(max(batch.first, each.first), min(batch.end, each.end)) for each in stretches]
    return [Batch(batch.epoch, first, end - first) for first, end in found if first < end]


def place(batch: Batch) -> tuple[int, int]:
    """Where a batch stands in the order of all epochs."""
    return batch.epoch, batch.first
