"""How much memory a process holds at its peak, and how long its steps take."""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM_UP = 2
"""Steps that are not counted: memory is found and kernels are chosen in them."""


class Meter:
    """Starts when the model is about to be sharded: what is there besides the model does not count."""

    def __init__(self, model_bytes: int) -> None:
        self._before = resident_bytes() - model_bytes
        self._times: list[float] = []
        self._last: float | None = None

    def begin(self) -> None:
        """The model is in place: from here on the peak counts."""
        with contextlib.suppress(OSError):
            RESET.write_text("5")

    def step(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        if self._last is not None:
            self._times.append(now - self._last)
        self._last = now

    def pause(self) -> None:
        """Something else than training goes on; the step after it is not counted."""
        self._last = None

    @property
    def step_s(self) -> float | None:
        """The median step."""
        counted = self._times[WARM_UP:] or self._times
        return statistics.median(counted) if counted else None

    @property
    def peak_bytes(self) -> int:
        """The most that was held at a time, beyond what was there before."""
        return max(0, _status("VmHWM") - self._before)


def resident_bytes() -> int:
    """Of this process, now."""
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
