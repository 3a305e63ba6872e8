"""Probabilistic Synchronous Parallel in virtual time: how far workers get, and what asking costs.

The reference run has 200 workers for 200 s, an iteration taking 1 s plus an exponential second. Its
mean numbers of steps were found with another simulator and one seed; ours must come within 5 %
(10 % of the 30 rounds of BSP, each as long as its longest iteration, which vary most).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.psp import PSP, Resample
from paceline.protocols.paced.psp_distributed import PeerBarrier
from paceline.protocols.paced.ssp import SSP
from paceline.sim import Cluster, Exponential, Membership, Timing, load_cluster, simulate
from paceline.sim.psp_peers import BarrierResult, SampleLook, simulate_barriers

TASK = Exponential(mean_s=2.0, spread=0.5)
REFERENCE = Cluster(workers=200, compute=TASK)
FEW = Cluster(workers=60, compute=TASK)
SAMPLES = (1, 2, 4, 8, 10, 16, 32, 64)
EVENT = (97.8, 93.6, 84.4, 73.5, 69.4, 59.9, 50.2, 40.9)
FIXED = (62.3, 53.7, 45.7, 40.7, 40.7, 37.3, 33.5, 32.1)


def test_the_task_takes_a_second_and_an_exponential_one(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("workers = 200\ncompute = {kind='exponential', mean_s=2, spread=0.5}")
    assert load_cluster(tmp_path / "c.toml") == REFERENCE
    timing = Timing(REFERENCE, 0)
    times = [timing.compute_s(worker, 0.0) for worker in range(200) for _ in range(50)]
    assert 1.0 <= min(times) < 1.01
    assert sum(t > 2.0 for t in times) / len(times) == pytest.approx(0.368, abs=0.02)


@cache
def steps(protocol: str, seed: int = 0, **settings: Any) -> list[int]:
    """How many steps each worker has made after 200 s."""
    made = {"asp": ASP, "bsp": BSP, "ssp": SSP, "psp": PSP}[protocol](**settings)
    ran = simulate(made, REFERENCE, iterations=1000, until_s=200.0, seed=seed, summarise=False)
    return list(ran.clock.values())


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("protocol", "settings", "expected", "within"),
    [("bsp", {}, 30.0, 0.1), ("ssp", {"staleness": 4}, 83.0, 0.05), ("asp", {}, 99.5, 0.05)],
    ids=["bsp", "ssp-4", "asp"],
)
def test_the_reference_run_without_samples(
    protocol: str, settings: dict[str, Any], expected: float, within: float
) -> None:
    assert mean(steps(protocol, **settings)) == pytest.approx(expected, rel=within)


@pytest.mark.parametrize(
    ("resample", "sample", "expected"),
    [
        *(("event", sample, expected) for sample, expected in zip(SAMPLES, EVENT, strict=True)),
        *(("fixed", sample, expected) for sample, expected in zip(SAMPLES, FIXED, strict=True)),
    ],
)
def test_the_reference_run_of_pbsp(resample: Resample, sample: int, expected: float) -> None:
    assert mean(steps("psp", sample=sample, resample=resample)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("resample", "expected", "fewest", "most"), [("event", 96.2, 87, 101), ("fixed", 88.2, 83, 91)]
)
def test_the_reference_run_of_pssp(resample: Resample, expected: float, fewest: int, most: int) -> None:
    done = steps("psp", sample=10, staleness=4, resample=resample)
    assert mean(done) == pytest.approx(expected, rel=0.05)
    assert (min(done), max(done)) == (pytest.approx(fewest, abs=4), pytest.approx(most, abs=4))


def spread(values: Sequence[float]) -> float:
    return mean([(value - mean(values)) ** 2 for value in values]) ** 0.5


@pytest.mark.parametrize("resample", ["event", pytest.param("fixed", marks=pytest.mark.long)])
def test_a_larger_sample_means_less_progress_and_less_spread(resample: Resample) -> None:
    runs = [[steps("psp", seed, sample=n, resample=resample) for seed in (0, 1)] for n in (1, 4, 16, 64)]
    progress = [sum(map(mean, seeds)) for seeds in runs]
    assert progress == sorted(progress, reverse=True)
    spreads = [sum(map(spread, seeds)) for seeds in runs[:3]]  # of 64 it is less than a step
    assert spreads == sorted(spreads, reverse=True)


@pytest.mark.parametrize("resample", ["event", "fixed"])
def test_more_staleness_means_more_progress(resample: Resample) -> None:
    progress = [mean(steps("psp", sample=10, staleness=s, resample=resample)) for s in (0, 1, 2, 4)]
    assert progress == sorted(progress)
    assert progress[0] < 0.9 * progress[-1]


def test_a_small_sample_removes_most_of_the_dispersion_of_asp_and_is_much_faster_than_bsp() -> None:
    few = steps("psp", sample=4)
    assert spread(few) < 0.3 * spread(steps("asp"))
    assert mean(few) > 2.5 * mean(steps("bsp"))


def test_a_straggler_delays_only_those_who_sample_it() -> None:
    cluster = Cluster(workers=60, compute=TASK, slow=dict.fromkeys(range(3), 4.0))
    lengths = {
        name: mean(list(simulate(made, cluster, iterations=500, until_s=100.0).clock.values()))
        for name, made in (("bsp", BSP()), ("ssp", SSP(4)), ("pbsp", PSP(5)), ("asp", ASP()))
    }
    assert lengths["bsp"] < lengths["ssp"] < lengths["pbsp"] < lengths["asp"]


# What asking costs.


class Watched(PSP):
    """PSP of which the simulator runs the very object, not a copy, so that its memory can be read."""

    def __deepcopy__(self, memo: Any) -> Watched:
        return self


@pytest.mark.parametrize(("resample", "queries"), [("event", 8.9e6), ("fixed", 0.08e6)])
def test_drawing_anew_at_every_event_looks_at_a_hundred_times_as_many_clocks(
    resample: Resample, queries: float
) -> None:
    psp = Watched(sample=10, resample=resample)
    simulate(psp, REFERENCE, iterations=1000, until_s=200.0)
    assert psp.queries == pytest.approx(queries, rel=0.05)


# Without a middle.


def peers(resample: Any, **more: Any) -> BarrierResult:
    settings = {"until_s": 60.0, "seed": 1, **more}
    return simulate_barriers(PeerBarrier(0, 10, 0, resample, poll_s=0.25), FEW, **settings)


def in_the_middle(**settings: Any) -> float:
    """The same with a store that knows all clocks."""
    ran = simulate(PSP(10, poll_s=0.25, **settings), FEW, iterations=1000, until_s=60.0, seed=1)
    return mean(list(ran.clock.values()))


@pytest.mark.parametrize(
    ("distributed", "central"),
    [
        ({"resample": "poll", "every_step": True}, {"resample": "event"}),
        ({"resample": "poll"}, {"resample": "poll"}),
        ({"resample": "fixed", "every_step": True}, {"resample": "fixed"}),
    ],
    ids=["event", "poll", "fixed"],
)
def test_without_latency_workers_get_as_far_as_with_a_store_in_the_middle(
    distributed: dict[str, Any], central: dict[str, Any]
) -> None:
    assert mean(peers(**distributed).steps) == pytest.approx(in_the_middle(**central), rel=0.08)


def test_control_messages_are_fewest_with_a_fixed_sample_and_most_with_a_new_one_at_every_step() -> None:
    fixed, poll, every_step = peers("fixed"), peers("poll"), peers("poll", every_step=True)
    assert 2 * fixed.queries < poll.queries
    assert 3 * poll.queries < every_step.queries
    for ran in (poll, every_step):
        assert ran.queries == 10 * ran.looks
    assert all(asked > 0.7 * mean(poll.asked) for asked in poll.asked)  # nobody is left out


def looks(resample: Any, latency_s: float, staleness: int) -> list[SampleLook]:
    found: list[SampleLook] = []
    barrier = PeerBarrier(0, 4, staleness, resample, poll_s=0.25)
    simulate_barriers(barrier, FEW, until_s=60.0, latency_s=latency_s, heard=found.append)
    return found


@pytest.mark.parametrize("resample", ["fixed", "poll"])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("latency_s", [0.0, 0.01, 0.5])
def test_a_stale_reply_never_lets_a_worker_pass_against_the_rule(
    latency_s: float, staleness: int, resample: Any
) -> None:
    for look in looks(resample, latency_s, staleness):
        behind = [peer for peer, reply in look.replies.items() if look.clock - reply > staleness]
        assert look.passed == (not behind)
        assert all(look.actual[peer] >= reply for peer, reply in look.replies.items())
        if look.passed:
            assert all(look.clock - actual <= staleness for actual in look.actual.values())


def test_a_stale_reply_may_make_a_worker_wait_longer() -> None:
    found = looks("poll", latency_s=0.5, staleness=0)
    refused = [look for look in found if not look.passed]
    assert any(all(look.clock <= actual for actual in look.actual.values()) for look in refused)
    assert not any(look.replies != look.actual for look in looks("poll", 0.0, 0))


def test_the_later_replies_come_the_longer_workers_wait() -> None:
    runs = [peers("poll", latency_s=latency_s) for latency_s in (0.0, 0.1, 0.5)]
    waits = [sum(ran.wait_s) for ran in runs]
    assert waits == sorted(waits)
    assert [mean(ran.steps) for ran in runs] == sorted((mean(ran.steps) for ran in runs), reverse=True)


def test_the_same_seed_gives_the_same_run_of_peers() -> None:
    assert peers("fixed") == peers("fixed")
    assert peers("fixed") != peers("fixed", seed=2)


def test_a_sample_of_nobody_never_waits_and_asks_nothing() -> None:
    ran = simulate_barriers(PeerBarrier(0, sample=0), FEW, until_s=50.0)
    assert (sum(ran.wait_s), ran.queries) == (0.0, 0)
    asp = simulate(ASP(), FEW, iterations=1000, until_s=50.0).clock
    assert ran.steps == [asp[worker] for worker in range(60)]


@pytest.mark.parametrize(
    ("cluster", "settings", "said"),
    [
        (FEW, {"until_s": 0.0}, "until_s must be > 0, got 0.0"),
        (FEW, {"until_s": 1.0, "latency_s": -1.0}, "latency_s must be >= 0, got -1.0"),
        (Cluster(workers=2, event=(Membership(1.0, kill=1),)), {"until_s": 1.0}, "neither join nor leave"),
    ],
)
def test_impossible_runs_of_peers_are_refused(cluster: Cluster, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulate_barriers(PeerBarrier(0), cluster, **settings)


# The distributed form, in the simulator of real runs.


def test_distributed_and_asking_nobody_takes_the_time_of_asp() -> None:
    apart, asp = (simulate(p, FEW, iterations=20) for p in (PSP(0, form="distributed"), ASP()))
    assert (apart.now, apart.clock, apart.staleness) == (asp.now, asp.clock, asp.staleness)
    assert apart.result().barrier_looks == apart.pushes
    assert apart.result().barrier_questions == 0
    assert asp.result().barrier_looks is None


def test_distributed_it_comes_as_far_as_the_simulator_of_messages_alone() -> None:
    """Another event loop, the same barriers and times; the first rank to look at one moment may differ."""
    barrier = PeerBarrier(0, sample=4, resample="poll", poll_s=0.1)
    messages = simulate_barriers(barrier, FEW, until_s=100.0)
    psp = PSP(sample=4, poll_s=0.1, form="distributed")
    stored = simulate(psp, FEW, iterations=1000, until_s=100.0, summarise=False)
    assert mean(list(stored.clock.values())) == pytest.approx(mean(messages.steps), rel=0.01)
    assert stored.result().barrier_questions == pytest.approx(messages.queries, rel=0.05)


def test_summed_up_a_distributed_run_tells_the_same_figures() -> None:
    lossy = Cluster(workers=60, compute=TASK, event=(Membership(9.0, kill=3),))
    psp = PSP(2, form="distributed")
    long, short = (simulate(psp, lossy, iterations=20, summarise=each).result() for each in (False, True))
    assert long.failures
    assert (long.barrier_looks or 0) > 60 * 20
    assert (long.barrier_looks, long.barrier_questions) == (short.barrier_looks, short.barrier_questions)
    assert long.waiting_share == pytest.approx(short.waiting_share)
