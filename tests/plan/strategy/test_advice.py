"""Which strategy is advised: every rule, at its threshold, and the formulas it is made from."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.plan.profile import ClusterProfile, Device, ModelProfile, Operator, TransferCost
from paceline.plan.profile.units import GIB
from paceline.plan.strategy import Constraints, advise
from paceline.plan.strategy.models import STRATEGIES, Load, load_of, memory_bytes, samples_per_s, sent_bytes

FAST = TransferCost(latency_s=0.0, bytes_per_s=1e15)


def load(
    *speeds: float,
    parameters: float = 1e9,
    state: float = 1.0,
    link: TransferCost = FAST,
    memory: int = 64 * GIB,
) -> Load:
    """Workers with these speeds, a second of work for speed 1, ten samples each."""
    devices = tuple(Device(name="d", flops_per_s=speed, memory_bytes=memory) for speed in speeds)
    return Load(
        parameters=parameters,
        largest=parameters / 10,
        activations=0.0,
        state_copies=state,
        seconds=tuple(1 / speed for speed in speeds),
        batch=10,
        cluster=ClusterProfile(devices=devices, link=link, overhead_bytes=0),
    )


@pytest.mark.parametrize(
    ("cluster", "wanted", "choice", "rule"),
    [
        (load(1, 1, 1, 1), {}, "ddp", 2),
        (load(1, 1.14), {}, "ddp", 2),
        (load(1, 1.16), {}, "ps-sync with backup workers", 3),
        (load(1, 1.3), {}, "ps-sync with batches that follow speeds", 3),
        (load(1, 2), {"tolerance": 3.9}, "ps-sync with batches that follow speeds", 3),
        (load(1, 2), {"tolerance": 4.0}, "ps-async", 3),
        (load(1, 1), {"tolerance": 4.0}, "ddp", 2),
        (load(1, 1), {"preemptible": True}, "ps-sync with backup workers", 3),
        (load(1, 1), {"preemptible": True, "tolerance": 4.0}, "ps-async", 3),
        (load(1, 1, parameters=0.4e9, memory=GIB), {}, "fsdp over 2 workers", 1),
        (
            load(1, 1, 1, 1, parameters=0.45e9, memory=GIB),
            {"memory_bytes": GIB // 2},
            "fsdp over 4 workers",
            1,
        ),
        (load(1, 1, 1, 1, parameters=4e9, memory=GIB), {}, "fsdp with activation checkpointing", 1),
        (load(1, 2, parameters=0.4e9, memory=GIB), {"tolerance": 10.0}, "fsdp over 2 workers", 1),
    ],
)
def test_the_first_rule_that_applies_decides(
    cluster: Load, wanted: dict[str, Any], choice: str, rule: int
) -> None:
    advice = advise(cluster, Constraints(**wanted))
    assert (advice.choice.startswith(choice), advice.rule) == (True, rule), advice
    assert advice.because


def test_a_slow_link_asks_for_fewer_bytes_before_anything_is_sharded() -> None:
    slow = load(1, 1, link=TransferCost(latency_s=0.0, bytes_per_s=1e9))  # a second for 1 GB each way
    assert any(hint.startswith("rule 4") for hint in advise(slow, Constraints()).hints)
    assert not advise(load(1, 1), Constraints()).hints


def test_where_only_the_optimizers_state_does_not_fit_a_store_is_named_beside_fsdp() -> None:
    """3 GB of weights, gradients and what is under way fit; 5 GB with Adam's state and buckets do not."""
    link = TransferCost(latency_s=0.0, bytes_per_s=1e9)
    short = load(1, 1, parameters=1e9, state=2.0, memory=round(4e9), link=link)
    advice = advise(short, Constraints())
    assert advice.rule == 1
    assert any("a worker of a store" in hint for hint in advice.hints)
    assert not any("store" in hint for hint in advise(load(1, 1), Constraints()).hints)


@pytest.mark.parametrize(("gain", "said"), [(1.04, "leave it"), (1.06, "it may be used")])
def test_the_modified_server_is_used_only_where_it_was_measured_to_gain(gain: float, said: str) -> None:
    measured = {"ps-sync": 100.0, "ps-async-mod": 100.0 * gain}
    [hint] = advise(load(1, 2), Constraints(measured=measured)).hints
    assert said in hint
    assert not advise(load(1, 2), Constraints()).hints


def test_measured_speeds_take_the_place_of_formulas() -> None:
    plain = advise(load(1, 2), Constraints(tolerance=5.0))
    slow = advise(load(1, 2), Constraints(tolerance=5.0, measured={"ps-async": 1.0}))
    assert (plain.choice, slow.choice) == ("ps-async", "ps-sync with backup workers")
    assert [row.strategy for row in slow.rows if row.measured] == ["ps-async"]


speeds = st.lists(st.floats(0.1, 10), min_size=1, max_size=8)


@given(speeds=speeds, parameters=st.floats(1e3, 1e12), state=st.sampled_from([0.0, 1.0, 2.0]))
def test_fsdp_sends_three_bytes_where_ddp_sends_two_and_never_saves_more_than_its_workers(
    speeds: list[float], parameters: float, state: float
) -> None:
    cluster = load(*speeds, parameters=parameters, state=state)
    assert sent_bytes("fsdp", cluster) == pytest.approx(1.5 * sent_bytes("ddp", cluster))
    assert memory_bytes("fsdp", cluster) * len(speeds) >= memory_bytes("single", cluster) * (1 - 1e-9)
    buckets = 0 if len(speeds) == 1 else parameters
    assert memory_bytes("ddp", cluster) == pytest.approx(memory_bytes("single", cluster) + buckets)


@pytest.mark.parametrize(("hosts", "command"), [(1, "--protocol allreduce"), (3, "torchrun --nnodes 3")])
def test_over_several_hosts_equal_workers_are_sent_to_torch(hosts: int, command: str) -> None:
    assert command in advise(load(1, 1, 1, 1), Constraints(hosts=hosts)).command
    with pytest.raises(ConfigError, match="at least 1 host, got --hosts 0"):
        Constraints(hosts=0)


@given(speeds=speeds)
def test_without_a_link_lockstep_follows_the_slowest_and_asynchrony_adds_up(speeds: list[float]) -> None:
    cluster = load(*speeds)
    assert samples_per_s("ps-sync", cluster) == pytest.approx(10 * len(speeds) * min(speeds), rel=1e-3)
    assert samples_per_s("ps-async", cluster) == pytest.approx(10 * sum(speeds), rel=1e-3)
    assert samples_per_s("single", cluster) == pytest.approx(10 * max(speeds))


def test_one_worker_is_the_same_under_every_strategy() -> None:
    alone = load(1)
    assert {round(samples_per_s(strategy, alone), 6) for strategy in STRATEGIES} == {10.0}


def test_a_measured_model_is_scaled_to_each_device_and_a_given_one_is_for_the_slowest() -> None:
    operators = (Operator(name="a", per_sample_s=0.1, parameter_bytes=100),)
    devices = tuple(Device(name="d", flops_per_s=speed, memory_bytes=GIB) for speed in (1e9, 2e9))
    cluster = ClusterProfile(devices=devices, link=FAST)
    measured = ModelProfile(model="m", operators=operators, flops_per_s=4e9)
    assert load_of(measured, cluster, 1).seconds == pytest.approx((0.4, 0.2))
    given_by_hand = msgspec.structs.replace(measured, flops_per_s=None)
    assert load_of(given_by_hand, cluster, 1).seconds == pytest.approx((0.1, 0.05))


def test_a_tolerance_that_is_no_number_of_points_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 to 100"):
        Constraints(tolerance=101)
