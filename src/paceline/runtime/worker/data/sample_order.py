"""The order of every epoch, the same on all workers.

It is what the user's sampler gives under a seed of run and epoch. A loader with a `generator` of its own
keeps it: its epochs have the very order that the same script has alone, for any number of workers.
An order is drawn as far as somebody asks for it, so a sampler may be of any length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, overload

import torch
from torch.utils.data import BatchSampler

from paceline.errors import ConfigError
from paceline.runtime.checkpoints.random_state import RandomState, generators, seed
from paceline.runtime.worker.data.drawing import OrderPiece, in_one_piece, pieces_of

KEPT = 1 << 26
"""Positions of an epoch that stay in memory, where they are not drawn in one piece. What comes before them is
drawn once more if it is wanted again: after a worker was lost, or by a run that is resumed."""
QUIET_S = 2.0
"""Drawing that takes longer than this is told of."""
LONG = 10_000_000
"""Positions that take longer than that where they are drawn by one call."""

Say = Callable[[str], None]


class SampleOrder(Sequence[Any]):
    """One epoch's units in the order in which they are dispensed."""

    def __init__(self, begin: Callable[[], None], sampler: Any, units: int, epoch: int, say: Say) -> None:
        """`begin` puts random number generators and the sampler where the epoch begins."""
        self._begin, self._sampler, self._units, self._epoch, self._say = begin, sampler, units, epoch, say
        self._own = generators(sampler)
        self.after: list[torch.Tensor] = []
        """Where the user's own generators stand after the epoch, once it is drawn to its end."""
        self._restart()

    def _restart(self) -> None:
        self._given: Iterator[OrderPiece] | None = None
        self._state: RandomState | None = None
        self._pieces: list[OrderPiece] = []
        self._starts: list[int] = []
        self._drawn = 0

    def __len__(self) -> int:
        return self._units

    @overload
    def __getitem__(self, where: int) -> Any: ...

    @overload
    def __getitem__(self, where: slice) -> list[Any]: ...

    def __getitem__(self, where: int | slice) -> Any:
        if isinstance(where, int):
            return self._cut(range(self._units)[where], 1)[0]
        start, stop, step = where.indices(self._units)
        return self._cut(start, stop - start)[::step]

    def _cut(self, start: int, count: int) -> list[Any]:
        stop, found = start + count, list[Any]()
        if count <= 0:
            return found
        if self._drawn and start < self._starts[0]:
            self._restart()
        self._draw(stop, keep=start)
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            place, piece = self._starts[at], self._pieces[at]
            part = piece.cut(start - place, min(stop - place, len(piece)))
            found += part
            start, at = start + len(part), at + 1
        return found

    def to_the_end(self) -> list[torch.Tensor]:
        """Draw what is left: where the user's own generators stand then."""
        self._draw(self._units, keep=self._units)
        return self.after

    def _draw(self, stop: int, keep: int) -> None:
        """Draw the order as far as `stop`; what stands before `keep` may be dropped."""
        if self._drawn >= stop:
            return
        outside, told = RandomState.now(self._sampler), monotonic()
        try:
            if self._state is not None:
                self._state.restore(self._sampler)
            while self._drawn < stop:
                self._more()
                self._forget(keep)
                if self._drawn < stop and monotonic() - told > QUIET_S:
                    told = monotonic()
                    self._say(self._progress())
            self._state = RandomState.now(self._sampler)
        finally:
            outside.restore(self._sampler)

    def _more(self) -> None:
        """The next piece; after the last one nothing may come."""
        if self._given is None:
            self._begin()
            self._given = pieces_of(self._sampler)
            if self._units > LONG and in_one_piece(self._sampler):
                self._say(self._progress())
        piece = next(self._given, None)
        if piece is None:
            raise ConfigError(
                f"the loader's sampler gave {self._drawn} of the {self._units} that its length promises, in "
                f"epoch {self._epoch}. Correct its __len__."
            )
        self._starts.append(self._drawn)
        self._pieces.append(piece)
        self._drawn += len(piece)
        if self._drawn > self._units or (self._drawn == self._units and self._has_more()):
            raise ConfigError(
                f"the loader's sampler gave more than the {self._units} that its length promises, in epoch "
                f"{self._epoch}: the rest would never be trained on. Correct its __len__, rounding up."
            )

    def _has_more(self) -> bool:
        """Whether anything follows; with that, generators of the user's own stand behind the epoch."""
        assert self._given is not None
        more = next(self._given, None) is not None
        self.after = [generator.get_state() for generator in self._own]
        return more

    def _forget(self, before: int) -> None:
        """Drop the oldest pieces where too much is kept."""
        while len(self._starts) > 1 and self._drawn - self._starts[0] > KEPT and self._starts[1] <= before:
            del self._starts[0], self._pieces[0]

    def _progress(self) -> str:
        return (
            f"drawing the order of epoch {self._epoch} from the loader's sampler: {self._drawn:,} of "
            f"{self._units:,} positions so far"
        )


class SampleOrders:
    """By epoch: the units in the order in which they are dispensed."""

    def __init__(
        self,
        sampler: Any,
        units: int,
        seed: int,
        fixed: bool = False,
        loader: Any = None,
        say: Say = lambda text: None,
    ) -> None:
        """`fixed`: that of the first epoch is that of every epoch; `say` is told if drawing takes long."""
        self._sampler = sampler
        self._fixed = fixed
        self._units = units
        self._seed = seed
        self._loader = loader
        self.say = say
        self._own = generators(sampler)
        self._states = {0: [generator.get_state() for generator in self._own]}
        """Where generators of the user's own stand before an epoch: the first, and the last ones begun."""
        self._orders: dict[int, SampleOrder] = {}

    def __getitem__(self, epoch: int) -> SampleOrder:
        epoch = 0 if self._fixed else epoch
        if epoch not in self._orders:
            if self._own:
                self._continue_to(epoch)
            self._orders[epoch] = self._order(epoch)
            for old in [e for e in self._orders if e < epoch - 1]:
                del self._orders[old]
        return self._orders[epoch]

    def _order(self, epoch: int) -> SampleOrder:
        states = self._states.get(epoch, [])

        def begin() -> None:
            for generator, state in zip(self._own, states, strict=False):
                generator.set_state(state)
            if self._own:
                self._begin_pass(epoch)
            self._begin(epoch)

        return SampleOrder(begin, self._sampler, self._units, epoch, lambda text: self.say(text))

    def _begin(self, epoch: int) -> None:
        seed((self._seed * 1_000_003 + epoch) & 0x7FFF_FFFF, None if self._own else self._sampler)
        for each in (self._sampler, getattr(self._sampler, "sampler", None)):
            if each is not None and hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def _continue_to(self, epoch: int) -> None:
        """Epoch after epoch from where the user's generator stood when the loader was prepared."""
        first = max(known for known in self._states if known <= epoch)
        for number in range(first, epoch):
            order = self._orders.get(number) or self._order(number)
            self._states[number + 1] = order.to_the_end()
            for old in [e for e in self._states if 0 < e < number]:
                del self._states[old]

    def _begin_pass(self, epoch: int) -> None:
        """A DataLoader draws a number from its generator whenever a pass begins, for processes that load."""
        generator = getattr(self._loader, "generator", None)
        kept = getattr(self._loader, "persistent_workers", False) and epoch > 0
        if generator in self._own and not kept:
            torch.empty((), dtype=torch.int64).random_(generator=generator)


class BatchOrders:
    """By epoch: the batches that a loader's batch sampler gives, and how many samples each has."""

    def __init__(
        self, batches: Any, count: int, seed: int, loader: Any, say: Say = lambda text: None
    ) -> None:
        self._size = batches.batch_size if type(batches) is BatchSampler else None
        self._count = count
        self._samples = count if self._size is None else len(batches.sampler)
        plain = batches if self._size is None else batches.sampler
        self.orders = SampleOrders(plain, self._samples, seed, loader=loader, say=say)

    def __len__(self) -> int:
        return self._count

    def batch(self, epoch: int, number: int) -> list[Any]:
        """The indices of one."""
        if self._size is None:
            found: list[Any] = list(self.orders[epoch][number])
            return found
        return self.orders[epoch][number * self._size : (number + 1) * self._size]

    def samples(self, epoch: int, number: int) -> int:
        """How many one has."""
        if self._size is None:
            return len(self.orders[epoch][number])
        return min(self._size, self._samples - number * self._size)

    def samples_before(self, epoch: int, number: int) -> int:
        """How many all before that one have together."""
        if self._size is None:
            return sum(len(self.orders[epoch][each]) for each in range(number))
        return min(number * self._size, self._samples)
