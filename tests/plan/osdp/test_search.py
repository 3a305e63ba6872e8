"""OSDP's search is exact, keeps the limit, and does what the cost model implies at its ends."""

from __future__ import annotations

import math
from itertools import product, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.plan.osdp import knapsack, scheduler
from paceline.plan.osdp.depth_first import search
from paceline.plan.osdp.knapsack import measured, smallest, solve
from paceline.plan.osdp.options import Mode, Option, OsdpCosts
from paceline.plan.osdp.plan import memory_curve
from paceline.plan.osdp.scheduler import plan_osdp
from paceline.plan.profile import ClusterProfile, Device, ModelProfile, Operator, TransferCost
from paceline.plan.profile.units import GIB, MIB

LINK = TransferCost(latency_s=1e-5, bytes_per_s=1e9)


def cluster(count: int, memory: int = 1000 * GIB, link: TransferCost = LINK) -> ClusterProfile:
    device = Device(name="d", flops_per_s=1e12, memory_bytes=memory)
    return ClusterProfile(devices=(device,) * count, link=link, overhead_bytes=0)


def layers(*sizes: int, activation: float = 0.0, slices: int = 1) -> ModelProfile:
    made = (
        Operator(
            name=f"layer{i}",
            parameter_bytes=size * MIB,
            activation_bytes=activation,
            per_sample_s=1e-3,
            max_slices=slices,
        )
        for i, size in enumerate(sizes)
    )
    return ModelProfile(model="m", operators=tuple(made))


options = st.builds(
    Option,
    st.integers(0, 40).map(lambda t: t / 8),
    st.integers(0, 12),
    st.integers(0, 6),
)
problems = st.lists(st.lists(options, min_size=1, max_size=4), min_size=1, max_size=6)


@given(problems, st.integers(0, 60))
def test_knapsack_depth_first_and_brute_force_find_the_same_time(
    problem: list[list[Option]], limit: int
) -> None:
    plans = [measured(chosen) for chosen in product(*problem)]
    fitting = [plan for plan in plans if plan.memory <= limit]
    found, reference = solve(problem, limit), search(problem, limit)
    assert smallest(problem) == min(plan.memory for plan in plans)
    if not fitting:
        assert found is None
        assert reference is None
        return
    fastest = min(plan.seconds for plan in fitting)
    assert found is not None
    assert reference is not None
    assert (found.seconds, reference.seconds) == (pytest.approx(fastest), pytest.approx(fastest))
    assert found.memory <= limit
    assert reference.memory == min(p.memory for p in fitting if p.seconds <= fastest + 1e-9)


sizes_in_bytes = st.lists(st.integers(1000, 3_000_000).map(lambda n: 4 * n), min_size=1, max_size=6)


@settings(max_examples=150)
@given(
    sizes_in_bytes,
    st.integers(2, 9),
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.sampled_from([("dp", "zdp"), ("dp", "zdp", "keep")]),
    st.booleans(),
    st.floats(0, 1),
)
def test_no_byte_of_the_limit_is_lost(
    sizes: list[int], count: int, latency_s: float, modes: tuple[Mode, ...], overlap: bool, share: float
) -> None:
    """Small layers: in units of 1 MiB most of their limit would be rounded away."""
    made = [
        Operator(name=str(i), parameter_bytes=size, activation_bytes=1e5, per_sample_s=1e-4 * i, max_slices=4)
        for i, size in enumerate(sizes)
    ]
    link = TransferCost(latency_s=latency_s, bytes_per_s=1e9)
    costs = OsdpCosts(cluster(count, link=link), 3, 2.0, modes=modes, slices=(1, 2), overlap=overlap)
    options_of_all = [costs.options(op) for op in made[:4]]
    plans = [measured(chosen) for chosen in product(*options_of_all)]
    least, most = smallest(options_of_all), max(plan.memory for plan in plans)
    limit = least + int(share * (most - least))
    found = solve(options_of_all, limit)
    assert found is not None
    assert found.memory <= limit
    fastest = min(plan.seconds for plan in plans if plan.memory <= limit)
    assert found.seconds == pytest.approx(fastest, rel=1e-11)


def test_a_search_that_keeps_few_choices_still_fits_and_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layers(*range(3, 43), slices=4)
    costs = OsdpCosts(cluster(5), 1, 2.0, slices=(1, 2, 4))
    every = [costs.options(op) for op in made.operators]
    limit = 2 * smallest(every) + 12345
    exact = solve(every, limit)
    monkeypatch.setattr(knapsack, "MOST_KEPT", 64)
    thinned = solve(every, limit)
    assert exact is not None
    assert thinned is not None
    assert thinned.memory <= limit
    assert exact.seconds < thinned.seconds <= exact.seconds * 1.001


@given(st.lists(st.integers(1, 64), min_size=1, max_size=8), st.integers(2, 9), st.integers(1, 4))
def test_a_plan_lies_between_all_replicated_and_all_sharded_and_gets_faster_with_memory(
    sizes: list[int], count: int, slices: int
) -> None:
    model, last = layers(*sizes, slices=8), math.inf
    costs = OsdpCosts(cluster(count), 1, 2.0, slices=(1, slices), launch_s=0.0)
    given_options = [costs.options(op) for op in model.operators]
    least, most = smallest(given_options), 4 * sum(sizes) * MIB
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        limit = int(least + share * max(most - least, 0)) + 1
        found = solve(given_options, limit)
        assert found is not None
        assert found.memory <= limit
        assert found.seconds <= last + 1e-12
        last = found.seconds
    plan = plan_osdp(model, cluster(count), most, batch=1)
    assert plan.predicted.seconds == pytest.approx(plan.replicated.seconds)
    assert plan.replicated.seconds <= plan.sharded.seconds


def test_sharding_moves_exactly_half_as_much_again_as_replicating() -> None:
    plan = plan_osdp(layers(3, 50, 7), cluster(5), batch=1)
    compute = 3e-3
    assert plan.sharded.seconds - compute == pytest.approx(1.5 * (plan.replicated.seconds - compute))


def test_without_a_limit_all_is_replicated_and_at_the_smallest_limit_all_is_sharded() -> None:
    model = layers(8, 8, 16)
    plan = plan_osdp(model, cluster(4), batch=1)
    assert {op.mode for op in plan.operators} == {"dp"}
    least = plan.sharded.memory_bytes
    tight = plan_osdp(model, cluster(4), least, batch=1)
    assert {op.mode for op in tight.operators} == {"zdp"}
    with pytest.raises(ConfigError, match=rf"smallest plan takes .* Use --memory {least // MIB}MiB"):
        plan_osdp(model, cluster(4), least - 1, batch=1)


def test_one_worker_has_no_communication_and_one_memory() -> None:
    costs = OsdpCosts(cluster(1), 3, 2.0, modes=("dp", "zdp", "keep"), slices=(1,))
    (op,) = layers(5, activation=100.0).operators
    made = costs.options(op)
    assert len(made) == 3
    assert {(o.memory, o.surge, o.comm_s) for o in made} == {(4 * 5 * MIB + 300, 0, 0.0)}


def test_more_slices_never_make_the_optimum_worse_and_divide_the_surge() -> None:
    model, last = layers(64, 32, slices=64), math.inf
    for slices in (1, 2, 4, 8):
        costs = OsdpCosts(
            cluster(4, link=TransferCost(latency_s=0.0, bytes_per_s=1e9)), 1, 2.0, slices=(slices,)
        )
        costs = costs._replace(launch_s=0.0)
        made = [costs.options(op) for op in model.operators]
        assert max(o.surge for o in made[0]) == 2 * 64 * MIB // slices
        found = solve(made, 300 * MIB)
        assert found is not None
        assert found.seconds <= last
        last = found.seconds


def test_splitting_lets_a_plan_fit_that_did_not() -> None:
    model = layers(512, slices=1024)
    whole = plan_osdp(model, cluster(8), batch=1).sharded.memory_bytes
    with pytest.raises(ConfigError, match="nothing fits"):
        plan_osdp(model, cluster(8), whole - 512 * MIB, batch=1)
    plan = plan_osdp(model, cluster(8), whole - 512 * MIB, batch=1, slices=(1, 2, 4))
    assert plan.operators[0].slices in (2, 4)
    assert plan.predicted.memory_bytes <= whole - 512 * MIB


def test_the_scheduler_takes_the_batch_with_most_samples_per_second() -> None:
    model = layers(8, 8, activation=4.0 * MIB)
    plan = plan_osdp(model, cluster(4), 100 * MIB)
    rates = {}
    for batch in range(1, 40):
        try:
            rates[batch] = plan_osdp(model, cluster(4), 100 * MIB, batch=batch).predicted.samples_per_s
        except ConfigError:
            break
    assert plan.batch == max(rates, key=rates.__getitem__) > 1
    assert plan.predicted.samples_per_s == pytest.approx(max(rates.values()))


def test_kept_parameters_move_as_much_as_replicating_and_hold_less() -> None:
    plan = plan_osdp(layers(64, 64), cluster(8), 260 * MIB, batch=1, modes=("dp", "zdp", "keep"))
    assert "keep" in {op.mode for op in plan.operators}
    assert plan.predicted.seconds == pytest.approx(plan.replicated.seconds)


TABLES = {
    1536: ((377, 271, 147, 116), (0.051672141, 0.054875135, 0.060699721, 0.069794059)),
    1024: ((169, 120, 80, 62), (0.022742944, 0.026182946, 0.028019806, 0.03295156)),
}


@pytest.mark.parametrize(
    ("hidden", "seconds", "counts", "memory"),
    [(1536, 2.901937, (0, 2, 46, 0), 7304), (1024, 1.135479, (39, 2, 7, 0), 7391)],
)
def test_the_published_profile_of_48_layers_gives_its_known_optimum(
    hidden: int, seconds: float, counts: tuple[int, ...], memory: int
) -> None:
    sizes, times = TABLES[hidden]
    layer = [Option(t, m, 0) for m, t in zip(sizes, times, strict=True)]
    found = solve([layer] * 48, 8192 - 800)
    assert found is not None
    assert found.seconds == pytest.approx(seconds, abs=1e-6)
    assert found.memory == memory
    assert tuple(found.chosen.count(option) for option in layer) == counts
    reference = search([layer] * 48, 8192 - 800)
    assert reference is not None
    assert reference.seconds == pytest.approx(found.seconds)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=5),
    st.integers(1, 5),
    st.floats(0.1, 3.0),
    st.floats(0.05, 1.2),
    st.booleans(),
)
def test_batch_sizes_that_are_skipped_could_not_have_been_the_best(
    sizes: list[int], count: int, activation: float, share: float, overlap: bool
) -> None:
    model, machines = layers(*sizes, activation=activation * MIB), cluster(count)
    least = plan_osdp(model, machines, batch=1).sharded.memory_bytes
    limit = int(least + share * 4 * sum(sizes) * MIB)
    rates = []
    for batch in takewhile(lambda b: b < 400, scheduler._batches()):
        try:
            plan = plan_osdp(model, machines, limit, batch=batch, overlap=overlap)
        except ConfigError:
            break
        rates.append(plan.predicted.samples_per_s)
    else:
        return  # so much fits that the whole range would have to be tried
    best = plan_osdp(model, machines, limit, overlap=overlap)
    assert best.predicted.samples_per_s == pytest.approx(max(rates), rel=1e-9)


@pytest.mark.parametrize("counts", [range(1, 33), range(33, 65)])
def test_plans_are_valid_for_any_number_of_workers(counts: range) -> None:
    for count in counts:
        _check_plans(count)


def _check_plans(count: int) -> None:
    for model in (layers(1), layers(300, 1, 1, 1), layers(*range(1, 25), activation=1e5)):
        least = plan_osdp(model, cluster(count), batch=1).sharded.memory_bytes
        plan = plan_osdp(model, cluster(count), least * 2, batch=1)
        assert plan.workers == count
        assert plan.predicted.memory_bytes <= least * 2
        assert plan.predicted.seconds == pytest.approx(sum(op.seconds for op in plan.operators))
        assert max(size for _, size in memory_curve(plan)) <= plan.predicted.memory_bytes


def test_an_operator_that_cannot_be_split_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'layer1' \(module\) cannot be split into 4"):
        plan_osdp(layers(1, 2), cluster(2), batch=1, split={"layer1": 4})
    with pytest.raises(ConfigError, match="Did you mean 'layer1'"):
        plan_osdp(layers(1, 2), cluster(2), batch=1, split={"layer_1": 4})
