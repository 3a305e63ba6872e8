"""Emulated devices, on a clock that only sleeping moves."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paceline.config import RunConfig
from paceline.runtime.worker.emulation import Emulation


class Clock:
    """Stands still unless told, or slept on."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def device(rank: int = 0, **dials: Any) -> Emulation:
    return Emulation(RunConfig(run="r", folder="f", workers=4, **dials), rank)


def compute(emulation: Emulation, clock: Clock, real_s: float) -> float:
    emulation.begin()
    clock.now += real_s
    return emulation.finish()


def test_without_emulation_compute_takes_what_it_takes(clock: Clock) -> None:
    assert compute(device(), clock, 0.25) == 0.25
    assert clock.now == 100.25


def test_compute_is_padded_to_the_device_time_times_the_slow_factor(clock: Clock) -> None:
    dials = {"device_time_s": 0.5, "slow": {3: 2.5}}
    assert compute(device(0, **dials), clock, 0.125) == 0.5
    assert compute(device(3, **dials), clock, 0.125) == 1.25
    assert clock.now == 101.75


def test_a_slow_factor_alone_stretches_what_was_measured(clock: Clock) -> None:
    assert compute(device(1, slow={1: 4.0}), clock, 0.25) == 1.0
    assert compute(device(0, slow={1: 4.0}), clock, 0.25) == 0.25


def test_compute_begins_with_the_first_batch_of_an_iteration(clock: Clock) -> None:
    emulation = device(device_time_s=1.0)
    emulation.begin()
    clock.now += 0.25
    emulation.begin()
    clock.now += 0.25
    assert emulation.finish() == 1.0


def test_a_step_without_any_batch_takes_no_time(clock: Clock) -> None:
    assert device(device_time_s=1.0).finish() == 0.0
    assert clock.now == 100.0


def test_jitter_is_seeded_bounded_and_each_ranks_own(clock: Clock) -> None:
    def times(rank: int, seed: int) -> list[float]:
        emulation = device(rank, device_time_s=1.0, jitter=0.25, seed=seed)
        return [round(compute(emulation, clock, 0.0), 9) for _ in range(50)]

    assert times(0, 1) == times(0, 1)
    assert times(0, 1) != times(1, 1)
    assert times(0, 1) != times(0, 2)
    assert all(0.75 <= t <= 1.25 for t in times(2, 3))
    assert max(times(2, 3)) - min(times(2, 3)) > 0.2


def test_a_device_slower_than_it_pretends_to_be_is_told_after_the_warm_up(clock: Clock) -> None:
    emulation = device(device_time_s=0.5)
    compute(emulation, clock, 3.0)
    for _ in range(9):
        compute(emulation, clock, 0.25)
    assert emulation.warning() is None
    compute(emulation, clock, 0.75)
    assert emulation.warning() is not None
    assert "in 1 of 11 iterations" in (emulation.warning() or "")


def test_device_time_is_that_of_one_batch_and_what_was_measured_is_not_scaled_again(clock: Clock) -> None:
    padded, stretched = device(3, device_time_s=0.5, slow={3: 2.0}), device(1, slow={1: 4.0})
    for emulation, real_s, expected in ((padded, 0.0, 1.5), (stretched, 0.25, 1.0)):
        emulation.begin()
        clock.now += real_s
        assert emulation.finish(batches=1.5) == expected
