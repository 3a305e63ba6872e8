"""Emulated devices: on a machine with fewer cores than workers, each worker gets a device of its own.

`device_time_s` pads a worker's compute to that time, times its `slow` factor, with seeded jitter;
`slow` alone stretches the compute as it was measured. In a balanced run the device time is that of a
batch of the loader's size, and scales with the samples. Padding sleeps, so four workers on two cores
behave as four devices. Whatever is injected stands in config, trace and report as *emulated*.

In an exact simulation the clock is not the worker's: peers ask how long their compute takes, and go on when
that much virtual time has passed. (A worker with a store says all in its push, which is put off instead.)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from paceline.config import RunConfig


class Emulation:
    """Times one worker's compute, and stretches it where the run says so."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        self._device_time_s = config.device_time_s
        self._factor = config.slow.get(rank, 1.0)
        self._jitter = config.jitter
        self._stretches = config.emulated is not None
        self._random = random.Random(f"{config.seed}/{rank}")
        self._began: float | None = None
        self.iterations = 0
        self.overruns = 0
        """Iterations whose real compute took longer than the emulated device allows."""

    def begin(self) -> None:
        """A batch is there: compute begins, unless it has begun already."""
        if self._began is None:
            self._began = time.perf_counter()

    def finish(self, batches: float = 1.0) -> float:
        """So many batches are computed: sleep for what the device would still need. Returns all of it."""
        if self._began is None:
            return 0.0
        real = time.perf_counter() - self._began
        missing = self._wanted(real, batches) - real if self._stretches else 0.0
        if missing > 0:
            time.sleep(missing)
        elif self._device_time_s is not None and self.iterations:  # the first one warms up
            self.overruns += 1
        self.iterations += 1
        spent, self._began = time.perf_counter() - self._began, None
        return spent

    def warning(self) -> str | None:
        """What to tell people when the emulation did not hold in more than one iteration of a hundred."""
        if self.overruns <= self.iterations / 100:
            return None
        return (
            f"real compute took longer than the emulated device time in {self.overruns} of {self.iterations} "
            "iterations. Raise --device-time for a fair comparison."
        )

    def _wanted(self, real: float, batches: float) -> float:
        spread = 1.0 + self._jitter * self._random.uniform(-1, 1) if self._jitter else 1.0
        usual = real if self._device_time_s is None else self._device_time_s * batches
        return usual * self._factor * spread


class VirtualDevice:
    """Computes in no time of its own; `ask` waits for what so many batches take, and tells it."""

    def __init__(self, ask: Callable[[float], float]) -> None:
        self._ask = ask

    def begin(self) -> None:
        """Nothing is measured."""

    def finish(self, batches: float = 1.0) -> float:
        """So many batches are computed."""
        return self._ask(batches)

    def warning(self) -> str | None:
        """It always holds."""
        return None
