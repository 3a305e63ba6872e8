"""How much gets done: against persistent slowness a bound helps nothing, against slow phases it does.

The counts are those of two workers of which one is twice as slow, over 3000 iterations' time of the
fast one, with 3 % jitter; and of four equal workers with slow phases.
"""

from __future__ import annotations

import pytest

from paceline.protocols import Pacing
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.dssp import DSSP
from paceline.protocols.paced.ssp import SSP
from paceline.sim import Cluster, Lognormal, Transient, simulate

UNEQUAL = Cluster.from_flags(workers=2, compute_s=1.0, jitter=0.03, slow={1: 2.0})
CHANGING = Cluster(workers=4, compute=Lognormal(1.0, 0.03), transient=Transient(2.0, 10.0, 30.0))


@pytest.mark.parametrize(
    ("protocol", "fast", "slow", "gap", "waits"),
    [
        (ASP(), 3000, 1500, 1501, 0.0),
        (SSP(3), 1504, 1500, 3, 0.5),
        (SSP(15), 1515, 1500, 15, 0.5),
        (DSSP(3, 15), 1509, 1499, 15, 0.5),
        (DSSP(3, 15, "figure2"), 2991, 1498, 1493, 0.003),
    ],
    ids=["asp", "ssp-3", "ssp-15", "dssp-bounded", "dssp-figure2"],
)
def test_a_bound_makes_persistently_unequal_workers_equally_fast(
    protocol: Pacing, fast: int, slow: int, gap: int, waits: float
) -> None:
    tally = simulate(protocol, UNEQUAL, iterations=(fast + slow) // 2, seed=1)
    result = tally.result()
    assert result.seconds == pytest.approx(3000, rel=0.005)
    assert tally.clock[0] == pytest.approx(fast, abs=6)
    assert tally.clock[1] == pytest.approx(slow, abs=6)
    assert result.max_clock_gap == pytest.approx(gap, abs=6 if gap > 15 else 0)
    assert result.waiting_share[0] == pytest.approx(waits, abs=0.01)
    assert result.waiting_share[1] == 0.0


@pytest.mark.parametrize("staleness", [3, 15])
def test_the_bound_is_reached_and_not_passed(staleness: int) -> None:
    assert simulate(SSP(staleness), UNEQUAL, iterations=100).result().max_clock_gap == staleness


def test_unbounded_readings_of_dssp_pass_the_upper_threshold() -> None:
    for preset in ("figure2", "printed"):
        protocol = DSSP(3, 15, preset)
        gap = simulate(protocol, UNEQUAL, iterations=1500, seed=1).result().max_clock_gap
        assert gap is not None
        assert gap > 15


def speed(protocol: Pacing) -> float:
    """Pushes per second against slow phases, over several seeds."""
    runs = [simulate(protocol, CHANGING, iterations=1000, seed=seed).result() for seed in range(3)]
    return sum(result.samples for result in runs) / sum(result.seconds for result in runs)


def test_the_looser_the_protocol_the_more_gets_done_against_slow_phases() -> None:
    bsp, ssp3, bounded, eager = map(speed, (BSP(), SSP(3), DSSP(3, 15), DSSP(3, 15, "bounded_eager")))
    figure2, ssp15, asp = map(speed, (DSSP(3, 15, "figure2"), SSP(15), ASP()))
    assert bsp < 0.9 * ssp3
    assert ssp3 < bounded * 1.005
    assert bounded < eager < figure2 < ssp15 < asp
    assert asp > 1.1 * ssp3
