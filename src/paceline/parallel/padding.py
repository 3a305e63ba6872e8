"""Emulated devices for a mesh: a forward takes a third of the device's time for a batch, a backward the rest.

As in `runtime.emulation`, padding sleeps, so four workers on two cores behave as four devices. Computing a
batch once more is another third.
"""

from __future__ import annotations

import random
import time

from paceline.config import RunConfig


class Padding:
    """Stretches one worker's compute where the run says so."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        self._time_s, self._jitter = config.device_time_s, config.jitter
        self._factor = config.slow.get(rank, 1.0)
        self._random = random.Random(f"{config.seed}/{rank}")
        self._stretches = config.emulated is not None

    def until(self, began: float, share: float) -> float:
        """Sleep for what the device would still need for this share of a batch; what all of it took."""
        spent = time.perf_counter() - began
        if self._stretches:
            spread = 1.0 + self._jitter * self._random.uniform(-1, 1) if self._jitter else 1.0
            usual = spent if self._time_s is None else self._time_s * share
            missing = usual * self._factor * spread - spent
            if missing > 0:
                time.sleep(missing)
        return time.perf_counter() - began
