"""What scripts do in their loops comes out under a plan as in one process, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from paceline.parallel.plans.capture import Captured
from paceline.parallel.plans.measure_model import measure_model
from paceline.parallel.plans.processes import run_ranks
from paceline.plan.hap.plan import HapPlan, plan_hap
from paceline.plan.hap.trace import trace
from paceline.plan.osdp.plan import OsdpPlan
from paceline.plan.osdp.scheduler import plan_osdp
from paceline.plan.profile import ClusterProfile, Device, TransferCost
from support import plan_ranks

TESTS = str(Path(__file__).parents[1])
RANKS = 2
CLUSTER = ClusterProfile(
    devices=(Device(name="d", flops_per_s=1e10, memory_bytes=2**40),) * RANKS,
    link=TransferCost(latency_s=1e-5, bytes_per_s=1e9),
    overhead_bytes=0,
)


def osdp_plan(kind: type[torch.nn.Module], *inputs: Any, mode: str = "dp") -> OsdpPlan:
    model, optimizer = plan_ranks.begun(kind)
    captured = Captured(model, optimizer, inputs, batch=plan_ranks.BATCH)
    plan = plan_osdp(measure_model(captured, "test"), CLUSTER, None, batch=plan_ranks.BATCH)
    ways = {"mode": mode, "sharded": int(mode != "dp")}
    operators = tuple(
        msgspec.structs.replace(op, **ways) if op.parameter_bytes else op for op in plan.operators
    )
    return msgspec.structs.replace(plan, operators=operators)


def branches(mode: str) -> OsdpPlan:
    return osdp_plan(plan_ranks.Branches, torch.randn(2, 4), "first", "left", "right", mode=mode)


def run(task: str, request: Any) -> list[Any]:
    return run_ranks(f"support.plan_ranks:{task}", RANKS, request, timeout_s=60, paths=(TESTS,), forked=True)


def test_a_parameter_without_a_gradient_is_left_alone_as_in_one_process() -> None:
    for answer in run("some_without_gradient", [branches("dp"), branches("zdp")]):
        assert max(answer) < 1e-6


def test_ranks_that_use_different_sharded_layers_are_refused() -> None:
    for told in run("mixed_up", branches("zdp")):
        assert "ranks used sharded layers differently in one step" in told


def hap_plan() -> HapPlan:
    x, y = torch.randn(4, 4), torch.randn(4, 1)
    graph = trace(plan_ranks.begun(plan_ranks.Straight)[0], (x, y)).graph
    return plan_hap(graph, CLUSTER, "test", plan_ranks.BATCH * RANKS)


def test_loops_train_as_in_one_process_or_are_refused() -> None:
    osdp = osdp_plan(plan_ranks.Straight, torch.randn(2, 4), torch.randn(2, 1))
    for answer in run("loops", {"osdp": osdp, "hap": hap_plan()}):
        for name, told in answer.items():
            assert told["closure"] < 1e-6, name
            assert told["scaler"] == [pytest.approx(0.0, abs=1e-6), 4.0], name
            assert "generator has different states on ranks 0 and 1" in told["order"]
            assert told["figures"] == [{"loss": 2.0}, pytest.approx(0.01)], "the lead's, for all"
            assert max(told["later"]) < 1e-6, name
            assert "evaluates the loss several times per step" in told["closures"]
            assert "a plan trains with one optimizer, prepare got 2" in told["several"]


def test_parameters_that_are_not_the_model_s_are_refused() -> None:
    plan = osdp_plan(plan_ranks.Straight, torch.randn(2, 4), torch.randn(2, 1), mode="zdp")
    for later, before in run("strangers", plan):
        assert "the optimizer got parameters after pace.prepare() that are not the prepared model's" in later
        assert "trains parameters that are not the model's, so no plan has them" in before


def test_under_hap_all_ranks_draw_the_same_numbers() -> None:
    first, second = run("noise", hap_plan())
    assert max(first["apart"], second["apart"]) < 1e-6
    assert first["drawn"] == second["drawn"]


def test_under_osdp_ranks_draw_numbers_of_their_own_and_need_the_same_data() -> None:
    plan = osdp_plan(plan_ranks.Straight, torch.randn(2, 4), torch.randn(2, 1))
    first, second = run("osdp_numbers", plan)
    assert not set(first["drawn"]) & set(second["drawn"])
    for told in (first, second):
        assert "ranks 0 and 1 have different data" in told["split"]


def test_under_osdp_a_loop_with_another_loader_than_prepare_gave_is_noticed() -> None:
    first, second = run("unused_loader", osdp_plan(plan_ranks.Straight, torch.randn(2, 4), torch.randn(2, 1)))
    assert ["without batches from the loader" in text for text in first] == [True]
    assert not second


def test_batches_that_differ_under_hap_are_refused() -> None:
    for told in run("other_noise", hap_plan()):
        assert "workers gave the model different batches" in told


def test_under_hap_a_removed_gradient_stays_away() -> None:
    assert max(run("without_gradient", hap_plan())) < 1e-6
