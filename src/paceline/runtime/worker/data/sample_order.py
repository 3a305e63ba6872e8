"""The order of every epoch, the same on all workers.

It is what the user's sampler gives under a seed of run and epoch. A loader with a `generator` of its own
keeps it: its epochs have the very order that the same script has alone, for any number of workers.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.runtime.checkpoints.random_state import RandomState, generators, seed


class SampleOrders:
    """By epoch: the units in the order in which they are dispensed."""

    def __init__(self, sampler: Any, units: int, seed: int, fixed: bool = False, loader: Any = None) -> None:
        """`fixed`: that of the first epoch is that of every epoch."""
        self._sampler = sampler
        self._fixed = fixed
        self._units = units
        self._seed = seed
        self._loader = loader
        self._own = generators(sampler)
        self._states = {0: [generator.get_state() for generator in self._own]}
        """Where generators of the user's own stand before an epoch: the first, and the next one to draw."""
        self._cache: dict[int, list[Any]] = {}

    def __getitem__(self, epoch: int) -> list[Any]:
        epoch = 0 if self._fixed else epoch
        if epoch not in self._cache:
            for old in [e for e in self._cache if e < epoch - 1]:
                del self._cache[old]
            self._cache[epoch] = self._draw(epoch)
        return self._cache[epoch]

    def _draw(self, epoch: int) -> list[Any]:
        kept = RandomState.now(self._sampler)
        try:
            order = self._continued(epoch) if self._own else self._listed(epoch)
        finally:
            kept.restore(self._sampler)
        if len(order) > self._units:
            raise ConfigError(
                f"the loader's sampler gave {len(order)} in epoch {epoch}, and has {self._units} by its "
                "length: the rest would never be trained on. Let its __len__ tell the truth, rounded up."
            )
        if len(order) < self._units:
            raise ConfigError(
                f"the loader's sampler gave {len(order)} of the {self._units} it has by its length, in epoch "
                f"{epoch}. Let its __len__ tell the truth."
            )
        return order

    def _listed(self, epoch: int) -> list[Any]:
        seed((self._seed * 1_000_003 + epoch) & 0x7FFF_FFFF, None if self._own else self._sampler)
        for each in (self._sampler, getattr(self._sampler, "sampler", None)):
            if each is not None and hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        return list(self._sampler)

    def _continued(self, epoch: int) -> list[Any]:
        """Epoch after epoch from where the user's generator stood when the loader was prepared."""
        first = max(known for known in self._states if known <= epoch)
        for number in range(first, epoch + 1):
            for generator, state in zip(self._own, self._states[number], strict=True):
                generator.set_state(state)
            self._begin_pass(number)
            order = self._listed(number)
            now = [generator.get_state() for generator in self._own]
            self._states = {0: self._states[0], number: self._states[number], number + 1: now}
        return order

    def _begin_pass(self, epoch: int) -> None:
        """A DataLoader draws a number from its generator whenever a pass begins, for processes that load."""
        generator = getattr(self._loader, "generator", None)
        kept = getattr(self._loader, "persistent_workers", False) and epoch > 0
        if generator in self._own and not kept:
            torch.empty((), dtype=torch.int64).random_(generator=generator)
