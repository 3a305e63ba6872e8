"""Where measured times cannot tell plans apart, OSDP takes the simplest, and says so."""

from __future__ import annotations

from io import StringIO
from itertools import product

import msgspec
import pytest
from rich.console import Console

from paceline.plan.osdp.options import OsdpCosts
from paceline.plan.osdp.plan import OsdpPlan
from paceline.plan.osdp.scheduler import plan_osdp
from paceline.plan.osdp.tables import everything
from paceline.plan.profile import ClusterProfile, Device, ModelProfile, Operator, TransferCost
from paceline.plan.profile.cluster import Kind
from paceline.plan.profile.units import MIB

KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce")
MODEL = ModelProfile(
    model="m",
    operators=tuple(
        Operator(name=f"layer{i}", parameter_bytes=size * MIB, per_sample_s=1e-3)
        for i, size in enumerate((5, 9, 7, 3, 11))
    ),
)


def measured(seconds: dict[Kind, float], off: float, count: int = 4) -> ClusterProfile:
    """Collectives that take so long per MiB, one in ten repeats this much less or longer."""

    def lines(factor: float) -> dict[Kind, TransferCost]:
        return {
            kind: TransferCost(latency_s=1e-5 * factor, bytes_per_s=MIB / (seconds[kind] * factor))
            for kind in KINDS
        }

    device = Device(name="d", flops_per_s=1e12, memory_bytes=2**40)
    return ClusterProfile(
        devices=(device,) * count,
        link=TransferCost(latency_s=0.0, bytes_per_s=1e9),
        collectives=lines(1.0),
        low=lines(1 - off) if off else {},
        high=lines(1 + off) if off else {},
        overhead_bytes=0,
    )


def modes(plan: OsdpPlan) -> set[str]:
    return {op.mode for op in plan.operators}


def half_way(cluster: ClusterProfile) -> OsdpPlan:
    free = plan_osdp(MODEL, cluster, batch=1)
    return plan_osdp(MODEL, cluster, (free.replicated.memory_bytes + free.sharded.memory_bytes) // 2, batch=1)


NOISY: dict[Kind, float] = {"all_gather": 1e-3, "reduce_scatter": 1e-3, "all_reduce": 3.05e-3}
"""All-reduces that seem slower than two gathers and a scatter."""


def test_sharding_that_is_faster_within_the_noise_only_is_left_for_all_replicated() -> None:
    assert modes(plan_osdp(MODEL, measured(NOISY, 0.0), batch=1)) == {"zdp"}, "the fastest by these times"
    plan = plan_osdp(MODEL, measured(NOISY, 0.1), batch=1)
    assert (modes(plan), plan.simplest) == ({"dp"}, "all replicated")
    assert plan.instead_of_s is not None
    assert plan.instead_of_s < plan.predicted.seconds == plan.replicated.seconds
    slow = NOISY | {"all_reduce": 9e-3}
    assert modes(plan_osdp(MODEL, measured(slow, 0.1), batch=1)) == {"zdp"}, "certain in spite of the noise"


def test_a_mix_is_taken_only_if_it_is_surely_faster_than_all_sharded() -> None:
    fair: dict[Kind, float] = {"all_gather": 1e-3, "reduce_scatter": 1e-3, "all_reduce": 2e-3}
    certain, noisy = half_way(measured(fair, 0.05)), half_way(measured(fair, 0.5))
    assert modes(certain) == {"zdp", "dp"}
    assert (modes(noisy), noisy.simplest) == ({"zdp"}, "all sharded")
    assert certain.predicted.seconds < noisy.predicted.seconds


def test_only_what_two_plans_treat_differently_counts() -> None:
    """Most of the time, and of its range, is a layer that has to be sharded in both."""
    sizes = (200, 5, 5)
    layers = [Operator(name=f"l{i}", parameter_bytes=size * MIB) for i, size in enumerate(sizes)]
    model = ModelProfile(model="m", operators=tuple(layers))
    fair: dict[Kind, float] = {"all_gather": 1e-3, "reduce_scatter": 1e-3, "all_reduce": 2e-3}
    cluster = measured(fair, 0.05)
    sharded = plan_osdp(model, cluster, batch=1).sharded
    plan = plan_osdp(model, cluster, sharded.memory_bytes + 30 * MIB, batch=1)
    assert [op.mode for op in plan.operators] == ["zdp", "dp", "dp"]
    assert plan.predicted.high_s is not None
    assert sharded.low_s is not None
    assert plan.predicted.high_s > sharded.low_s, "their ranges overlap as a whole"


@pytest.mark.parametrize("seed", range(12))
def test_noise_within_the_range_does_not_change_the_plan(seed: int) -> None:
    """As when the same command is given several times."""
    off = {kind: 1 + 0.05 * sign for kind, sign in zip(KINDS, SIGNS[seed], strict=True)}
    fair: dict[Kind, float] = {"all_gather": 1e-3, "reduce_scatter": 1e-3, "all_reduce": 2e-3}
    seen: dict[Kind, float] = {kind: fair[kind] * off[kind] for kind in KINDS}
    plan, other = half_way(measured(seen, 0.1)), half_way(measured(fair, 0.1))
    assert [op.mode for op in plan.operators] == [op.mode for op in other.operators]


SIGNS = [signs for signs in product((-1, 0, 1), repeat=3) if sum(map(abs, signs)) == 2]


def test_the_range_of_a_plan_is_that_of_its_transfers_and_is_printed_with_its_figures() -> None:
    """Two layers of 1 MiB on two devices, 1 ms of computing each."""
    layers = [Operator(name=name, parameter_bytes=MIB, per_sample_s=1e-3) for name in "ab"]
    model = ModelProfile(model="two", operators=tuple(layers))
    cluster = measured({"all_gather": 1e-3, "reduce_scatter": 1e-3, "all_reduce": 2e-3}, 0.2, count=2)
    plan = plan_osdp(model, cluster, batch=1)
    moving = 2 * (1e-5 + 2e-3)
    assert plan.predicted.seconds == pytest.approx(2e-3 + moving)
    assert plan.predicted.low_s == pytest.approx(2e-3 + 0.8 * moving)
    assert plan.predicted.high_s == pytest.approx(2e-3 + 1.2 * moving)
    console = Console(width=200, record=True, file=StringIO())
    console.print(everything(plan))
    shown = {line.split("│")[1].strip(): line for line in console.export_text().splitlines() if "│" in line}
    row = [cell.strip() for cell in shown["this plan"].split("│")[2:-1]]
    assert row == ["8.00 MiB", "6.02 ms (5.22 ms to 6.82 ms)", f"{2 / 6.02e-3:.1f}", "yes"]
    sharded = [cell.strip() for cell in shown["all sharded (FSDP, even)"].split("│")[2:-1]]
    assert sharded[:2] == ["6.00 MiB", "8.06 ms (6.85 ms to 9.27 ms)"]


def test_overlap_hides_the_shorter_of_computing_and_moving_in_every_operator() -> None:
    """Against every combination of ways, with the costs written out."""
    n, latency, rate, batch = 4, 1e-3, 1e9, 3
    link = TransferCost(latency_s=latency, bytes_per_s=rate)
    device = Device(name="d", flops_per_s=1e12, memory_bytes=2**40)
    cluster = ClusterProfile(devices=(device,) * n, link=link, overhead_bytes=0)
    sizes, computing = (3_000_000, 40_000_000, 9_000_000, 800_000), (0.03, 0.01, 0.05, 0.001)
    operators = tuple(
        Operator(name=str(i), parameter_bytes=size, per_sample_s=seconds / batch, activation_bytes=1000.0)
        for i, (size, seconds) in enumerate(zip(sizes, computing, strict=True))
    )
    model = ModelProfile(model="m", operators=operators, state_copies=2.0)

    def ring(size: float) -> float:
        return (n - 1) * (latency + size / n / rate)

    def figures(sharded: tuple[bool, ...]) -> tuple[float, int]:
        time, held, surge = 0.0, 0, 0
        for size, seconds, cut in zip(sizes, computing, sharded, strict=True):
            time += max(seconds, (3 if cut else 2) * ring(size))
            held += 4 * size // (n if cut else 1) + 3000
            surge = max(surge, 2 * size if cut else 0)
        return time, held + surge

    every = [figures(cut) for cut in product((False, True), repeat=4)]
    for limit in sorted({memory for _, memory in every}):
        fastest = min(time for time, memory in every if memory <= limit)
        plan = plan_osdp(model, cluster, limit, batch=batch, overlap=True)
        assert plan.predicted.seconds == pytest.approx(fastest)
        serial = plan_osdp(model, cluster, limit, batch=batch)
        assert plan.predicted.seconds < serial.predicted.seconds


def test_prices_at_an_end_of_the_range_are_those_of_that_end() -> None:
    cluster = measured(NOISY, 0.5)
    low = OsdpCosts(cluster.at(cluster.low), 1, 2.0).options(MODEL.operators[0])[0]
    assert low.comm_s == pytest.approx(0.5 * (1e-5 + 5 * 3.05e-3))
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=ClusterProfile) == cluster
