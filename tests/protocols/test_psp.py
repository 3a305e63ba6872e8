"""Probabilistic Synchronous Parallel."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb, inf, sqrt
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols import Decision, Pacing
from paceline.protocols.core.clocks import ClockTable
from paceline.protocols.paced import psp_barriers
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.psp import PSP, Resample
from paceline.protocols.paced.psp_bounds import mean_displacement, mean_squared_displacement
from paceline.protocols.paced.psp_sampling import chance, draw_sample, may_lag
from paceline.protocols.paced.ssp import SSP
from support.drive import Schedule, Step, drive
from support.schedules import schedules

every_resample = pytest.mark.parametrize("resample", ["event", "fixed", "poll"])
staleness_values = pytest.mark.parametrize("staleness", [0, 1, 4])
ENDLESS = 10**6
ALL = 99
"""More than there are others."""


def decisions(protocol: Pacing, schedule: Schedule) -> list[Decision]:
    return [step.decision for step in drive(protocol, schedule)]


def releases(protocol: Pacing, schedule: Schedule) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(step.event, step.worker, step.released) for step in drive(protocol, schedule)]


def level_others(step: Step, worker: int, staleness: int) -> int:
    """How many others do not lag behind a worker."""
    clock = step.after[worker]
    return sum(clock - step.after[peer] <= staleness for peer in step.after if peer != worker)


# What it is at its ends.


@every_resample
@given(schedule=schedules())
def test_a_sample_of_nobody_decides_exactly_as_asp(resample: Resample, schedule: Schedule) -> None:
    assert decisions(PSP(sample=0, resample=resample), schedule) == decisions(ASP(), schedule)


@every_resample
@given(schedule=schedules())
def test_endless_staleness_decides_exactly_as_asp(resample: Resample, schedule: Schedule) -> None:
    psp = PSP(sample=2, staleness=ENDLESS, resample=resample)
    assert decisions(psp, schedule) == decisions(ASP(), schedule)


@staleness_values
@given(schedule=schedules())
def test_a_sample_of_all_others_decides_exactly_as_ssp(staleness: int, schedule: Schedule) -> None:
    assert decisions(PSP(ALL, staleness), schedule) == decisions(SSP(staleness), schedule)


@staleness_values
@given(schedule=schedules(churn=False))
def test_a_fixed_sample_of_all_others_decides_exactly_as_ssp_while_nobody_joins(
    staleness: int, schedule: Schedule
) -> None:
    assert decisions(PSP(ALL, staleness, "fixed"), schedule) == decisions(SSP(staleness), schedule)


@given(schedule=schedules())
def test_all_others_without_staleness_wait_exactly_as_under_bsp(schedule: Schedule) -> None:
    assert releases(PSP(ALL, 0), schedule) == releases(BSP(), schedule)


def test_one_less_than_all_others_is_no_longer_ssp() -> None:
    schedule = Schedule(workers=5, speeds=(1, 1, 1, 1, 9), iterations=30)
    assert releases(PSP(sample=4), schedule) == releases(SSP(0), schedule)
    assert releases(PSP(sample=3), schedule) != releases(SSP(0), schedule)


# The rule.


@pytest.mark.parametrize("resample", ["event", "poll"])
@given(schedule=schedules(workers=6), sample=st.integers(0, 6), staleness=st.integers(0, 2))
def test_who_passes_has_a_samples_worth_of_others_that_do_not_lag(
    resample: Resample, schedule: Schedule, sample: int, staleness: int
) -> None:
    for step in drive(PSP(sample, staleness, resample), schedule):
        size = min(sample, len(step.after) - 1)
        assert all(level_others(step, worker, staleness) >= size for worker in step.released)


class Recorder:
    """Draws samples and remembers the last one of each worker."""

    def __init__(self) -> None:
        self.samples: dict[int, list[int]] = {}
        self.draws = 0

    def __call__(self, members: Any, worker: int, size: int, uniform: Any) -> list[int]:
        self.draws += 1
        self.samples[worker] = draw_sample(members, worker, size, uniform)
        return self.samples[worker]


@given(schedule=schedules(workers=6), sample=st.integers(0, 6), staleness=st.integers(0, 2))
def test_with_a_fixed_sample_a_worker_waits_exactly_until_nobody_in_it_lags(
    schedule: Schedule, sample: int, staleness: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        drawn = Recorder()
        patch.setattr(psp_barriers, "draw_sample", drawn)
        left: set[tuple[int, int]] = set()  # (worker, peer): the peer left while the worker waited
        for step in drive(PSP(sample, staleness, "fixed"), schedule):
            if step.event in ("died", "finished"):
                left |= {(worker, step.worker) for worker in step.waited}
            if step.event == "push":
                left = {pair for pair in left if pair[0] != step.worker}
            behind = {
                worker: [
                    peer
                    for peer in drawn.samples[worker]
                    if (worker, peer) not in left and step.after[worker] - step.after[peer] > staleness
                ]
                for worker in step.waited
            }
            assert all(not behind[worker] for worker in step.released)
            assert all(behind[worker] for worker in step.waiting)


def test_with_a_fixed_sample_a_barrier_draws_once() -> None:
    with pytest.MonkeyPatch.context() as patch:
        drawn = Recorder()
        patch.setattr(psp_barriers, "draw_sample", drawn)
        steps = list(drive(PSP(2, resample="fixed"), Schedule(workers=6, speeds=(1, 2, 9))))
    assert drawn.draws == sum(step.event == "push" for step in steps)


@pytest.mark.parametrize("resample", ["event", "fixed"])
@given(schedule=schedules(), sample=st.integers(0, 5), staleness=st.integers(0, 2))
def test_who_is_within_staleness_of_the_slowest_never_waits(
    resample: Resample, schedule: Schedule, sample: int, staleness: int
) -> None:
    for step in drive(PSP(sample, staleness, resample), schedule):
        assert all(step.gap(worker) > staleness for worker in step.waiting)


@given(schedule=schedules(), sample=st.integers(0, 5))
def test_when_polling_the_slowest_passes_at_its_first_look(schedule: Schedule, sample: int) -> None:
    for step in drive(PSP(sample, resample="poll"), schedule):
        if step.event == "push" and step.gap(step.worker) == 0:
            assert step.worker in step.released


@given(schedule=schedules(), poll_s=st.sampled_from([0.25, 0.7, 3.0]))
def test_when_polling_a_worker_looks_at_its_push_and_every_poll_s_after_it(
    schedule: Schedule, poll_s: float
) -> None:
    pushed: dict[int, float] = {}
    for step in drive(PSP(1, resample="poll", poll_s=poll_s), schedule):
        if step.event == "push":
            pushed[step.worker] = step.now
        for worker in step.released:
            looks = (step.now - pushed[worker]) / poll_s
            assert looks == pytest.approx(round(looks), abs=1e-4)


def test_without_staleness_a_bound_on_the_gap_does_not_exist() -> None:
    schedule = Schedule(workers=6, speeds=(1, 1, 1, 1, 1, 200), transient=0.0, iterations=60)
    assert max(step.decision.gap for step in drive(PSP(sample=1), schedule)) > 10


# Sampling.


@given(count=st.integers(2, 12), at=st.integers(0, 11), size=st.integers(0, 11), seed=st.integers(0, 999))
def test_a_sample_has_distinct_members_and_never_the_worker_itself(
    count: int, at: int, size: int, seed: int
) -> None:
    members = [10 * n for n in range(count)]
    worker, size = members[at % count], min(size, count - 1)
    sample = draw_sample(members, worker, size, Random(seed).random)
    assert len(sample) == len(set(sample)) == size
    assert set(sample) <= set(members) - {worker}


@pytest.mark.parametrize("worker", [0, 3, 6])
def test_every_sample_is_equally_likely(worker: int) -> None:
    """Chi-square over all 20 samples of 3 out of 6 others; 43.8 is its 0.1 % point."""
    psp, draws = PSP(seed=1), 20_000
    seen = Counter(frozenset(draw_sample(range(7), worker, 3, psp.uniform)) for _ in range(draws))
    expected = draws / comb(6, 3)
    assert len(seen) == comb(6, 3)
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 43.8


def test_the_chance_to_pass_is_the_share_of_samples_that_pass() -> None:
    for others, size in ((6, 0), (6, 1), (6, 3), (6, 6), (7, 4)):
        samples = list(combinations(range(others), size))
        for lagging in range(others + 1):
            for allowed in range(size + 1):
                passing = sum(sum(peer < lagging for peer in sample) <= allowed for sample in samples)
                assert chance(lagging, others, size, allowed) == passing / len(samples)


def test_the_chance_to_pass_is_about_the_power_of_the_share_that_does_not_lag() -> None:
    assert chance(300, 9999, 10) == pytest.approx((1 - 300 / 9999) ** 10, rel=1e-3)
    assert chance(3000, 9999, 1000) == pytest.approx(0.0, abs=1e-100)


def table(level: int, lagging: int, waiting: int = 1) -> ClockTable:
    """`waiting` workers wait at clock 1, `level` compute at clock 1, `lagging` compute at clock 0."""
    clocks = ClockTable()
    for worker in range(waiting + level + lagging):
        clocks.join(worker)
    for worker in range(waiting + level):
        clocks.push(worker, 1)
    for worker in range(waiting, waiting + level):
        clocks.release(worker)
    return clocks


def assert_share(count: int, of: int, probability: float) -> None:
    """Within four standard deviations."""
    spread = sqrt(of * probability * (1 - probability))
    assert abs(count - of * probability) <= 4 * spread + 1e-9


@every_resample
@pytest.mark.parametrize(
    ("level", "lagging", "sample"), [(5, 3, 2), (7, 1, 8), (2, 6, 2), (3, 5, 4), (4, 4, 1)]
)
def test_one_look_passes_with_the_hypergeometric_probability(
    resample: Resample, level: int, lagging: int, sample: int
) -> None:
    clocks, runs = table(level, lagging), 2000
    passed = sum(
        PSP(sample, 0, resample, seed=seed).decide(clocks, 0).release == (0,) for seed in range(runs)
    )
    assert_share(passed, runs, comb(level, sample) / comb(level + lagging, sample))


def looks_until_all_have_passed(waiting: int, seed: int) -> list[int]:
    """After how many events each of those who wait at one clock passes; 2 others lag."""
    clocks, psp, looks, event = table(6, 2, waiting), PSP(sample=3, seed=seed), [], 0
    while clocks.waiting_count:
        event += 1
        for worker in psp.decide(clocks, None).release:
            clocks.release(worker)
            looks.append(event)
    return looks


@pytest.mark.parametrize("waiting", [1, 5])
def test_each_event_is_another_look_with_a_new_sample(waiting: int) -> None:
    runs = 1000
    seen = Counter(look for seed in range(runs) for look in looks_until_all_have_passed(waiting, seed))
    q = chance(2, 7 + waiting, 3)
    for look in (1, 2, 3, 4):
        assert_share(seen[look], runs * waiting, (1 - q) ** (look - 1) * q)


def test_those_who_wait_at_one_clock_pass_each_for_itself_and_alike() -> None:
    clocks, runs, n = table(4, 3, waiting=5), 4000, 5
    together, alone = Counter[int](), Counter[int]()
    for seed in range(runs):
        passed = PSP(sample=2, seed=seed).decide(clocks, None).release
        together[len(passed)] += 1
        alone.update(passed)
    q = chance(3, 11, 2)
    for k in range(n + 1):
        assert_share(together[k], runs, comb(n, k) * q**k * (1 - q) ** (n - k))
    for worker in range(n):
        assert_share(alone[worker], runs, q)


# The extension.


@pytest.mark.parametrize(
    ("size", "fraction", "may"), [(10, 1.0, 0), (10, 0.55, 4), (20, 0.55, 9), (3, 0.5, 1)]
)
def test_at_least_the_fraction_must_not_lag(size: int, fraction: float, may: int) -> None:
    assert may_lag(size, fraction) == may
    assert (size - may - 1) / size < fraction <= (size - may) / size


@pytest.mark.parametrize("resample", ["event", "fixed"])
@given(schedule=schedules(churn=False), fraction=st.sampled_from([0.25, 0.5, 0.75]))
def test_with_all_others_a_worker_passes_exactly_when_the_fraction_of_them_does_not_lag(
    resample: Resample, schedule: Schedule, fraction: float
) -> None:
    for step in drive(PSP(ALL, 0, resample, pass_fraction=fraction), schedule):
        if step.event == "push":
            others = len(step.after) - 1
            assert all(level_others(step, w, 0) >= fraction * others for w in step.released)
            assert all(level_others(step, w, 0) < fraction * others for w in step.waiting)


# Reproducible, and cheap to keep.


def test_the_seed_decides() -> None:
    schedule = Schedule(workers=8, speeds=(1, 2, 5), iterations=30)
    one, again, other = (decisions(PSP(seed=seed), schedule) for seed in (1, 1, 2))
    assert one == again
    assert one != other


@pytest.mark.parametrize(("resample", "looks"), [("event", 5), ("fixed", 2)])
def test_queries_count_the_clocks_looked_at(resample: Resample, looks: int) -> None:
    psp, clocks = PSP(sample=3, resample=resample), ClockTable()
    for worker in range(5):
        clocks.join(worker)
    for worker in (0, 1):  # nobody is level with them: both wait
        clocks.push(worker, 1)
        assert psp.decide(clocks, worker).release == ()
    clocks.leave(4)
    psp.decide(clocks, None)  # with events, both look again
    assert psp.queries == 3 * looks


@given(schedule=schedules(), asks=st.lists(st.integers(0, 8), min_size=1), staleness=st.integers(0, 2))
def test_count_below_is_right_whenever_it_is_asked(
    schedule: Schedule, asks: list[int], staleness: int
) -> None:
    for number, step in enumerate(drive(PSP(2, staleness), schedule)):
        clock = step.clocks.slowest + asks[number % len(asks)]
        assert step.clocks.count_below(clock) == sum(other < clock for other in step.after.values())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sample": -1}, "sample must be >= 0, got -1"),
        ({"staleness": -1}, "staleness must be >= 0, got -1"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"resample": "often"}, "cannot resample 'often'. Use event, fixed or poll"),
        ({"poll_s": 0.0}, "poll_s must be > 0, got 0.0"),
        ({"poll_s": inf}, "poll_s must be > 0, got inf"),
        ({"pass_fraction": 0.0}, r"pass_fraction must be in 0\.\.1, got 0.0"),
        ({"pass_fraction": 1.1}, r"pass_fraction must be in 0\.\.1, got 1.1"),
    ],
)
def test_impossible_settings_are_refused_with_their_value(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PSP(**settings)


# Theory.


@pytest.mark.parametrize(
    ("sample", "pass_chance", "mean", "squared"),
    [(1, 0.5, 14.67, 73.3), (4, 0.2, 12.93, 41.2), (128, 0.2, 9.60, 30.6)],
)
def test_the_bounds_have_the_published_values(
    sample: int, pass_chance: float, mean: float, squared: float
) -> None:
    assert mean_displacement(pass_chance, sample, 4, 10_000) == pytest.approx(mean, abs=0.005)
    assert mean_squared_displacement(pass_chance, sample, 4, 10_000) == pytest.approx(squared, abs=0.05)


def test_more_samples_tighten_the_bounds_most_at_first() -> None:
    bounds = [mean_displacement(0.2, sample, 4, 10_000) for sample in (1, 2, 4, 8, 64)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] - bounds[2] > 0.7 * (bounds[0] - bounds[4])


@pytest.mark.parametrize(("level", "lagging", "sample"), [(5, 3, 2), (2, 6, 2), (4, 4, 1), (1, 1, 9)])
def test_the_chance_is_that_of_a_sample_of_the_others(level: int, lagging: int, sample: int) -> None:
    """The worker itself is at the clock that is asked about, and no member of its sample."""
    size = min(sample, level + lagging)
    expected = comb(level, size) / comb(level + lagging, size)
    assert PSP(sample, 0).chance(table(level, lagging), 1) == pytest.approx(expected)
    assert PSP(sample, 1).chance(table(level, lagging), 1) == 1.0
