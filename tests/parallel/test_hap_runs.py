"""A HAP program on real, unequal processes computes what one process computes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.errors import ConfigError
from paceline.parallel.plans.processes import run_ranks
from paceline.plan.hap.plan import HapPlan, plan_hap
from paceline.plan.hap.trace import trace
from paceline.plan.profile import ClusterProfile, Device, TransferCost
from paceline.plan.profile.cluster import KINDS as COLLECTIVES
from support.hap_models import BATCH, KINDS, WithLoss, model

TESTS = str(Path(__file__).parents[1])
RANKS = 4
RATIOS = ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.5, 0.0, 0.5, 0.0], [0.25] * 4)
SOME = (0, 3, 5)
"""Of a model's six cases `make test` tries one: with a loss, in two segments, or the plan's ratios."""


def odd_cluster(draw: random.Random) -> ClusterProfile:
    """Prices at random, so that programs of all kinds are the cheapest."""
    devices = tuple(
        Device(name="d", flops_per_s=draw.uniform(1e8, 4e9), memory_bytes=2**40) for _ in range(RANKS)
    )
    lines = {
        kind: TransferCost(latency_s=draw.choice((1e-9, 1e-7, 1e-5)), bytes_per_s=10 ** draw.uniform(7, 12))
        for kind in COLLECTIVES
    }
    return ClusterProfile(
        devices=devices,
        link=TransferCost(latency_s=0.0, bytes_per_s=1e9),
        collectives=lines,
        overhead_bytes=0,
    )


def cases(every: bool) -> list[dict[str, Any]]:
    draw, made = random.Random(7), []
    for place, kind in enumerate(KINDS):
        for number in range(6) if every else (SOME[place % 3],):
            whole, x, y = model(kind)
            loss = number % 2 == 0
            traced = trace(WithLoss(whole), (x, y)) if loss else trace(whole, (x,))
            segments = 2 if number in (3, 4) else 1
            plan = plan_hap(traced.graph, odd_cluster(draw), kind, BATCH, segments=segments)
            ratios = (
                tuple(tuple(RATIOS[(number + s) % 4]) for s in range(segments)) if number < 5 else plan.ratios
            )
            plan = msgspec.structs.replace(plan, ratios=ratios)
            made.append({"kind": kind, "loss": loss, "plan": plan})
    return made


@pytest.mark.timeout(400)
def test_any_program_and_any_ratios_give_loss_gradients_and_weights_of_one_process(
    request: pytest.FixtureRequest,
) -> None:
    whole = request.config.getoption("--every-case")
    every = cases(whole)
    answers = run_ranks(
        "support.hap_ranks:everything", RANKS, {"cases": every}, timeout_s=350, paths=(TESTS,), forked=True
    )
    used = {i.kind for case in every for i in case["plan"].program.instructions}
    if whole:
        assert used == {
            "compute",
            "all_gather",
            "slice",
            "reduce_scatter",
            "all_reduce",
            "all_to_all",
            "finish",
        }
        variants = {i.variant for case in every for i in case["plan"].program.instructions}
        assert {"padded", "grouped"} <= variants
    for answer in answers:
        assert answer["adjoint"] < 1e-12
        assert answer["same"]
        for case, apart in zip(every, answer["plans"], strict=True):
            assert max(apart.values()) < 1e-10, f"{case['kind']}, loss {case['loss']}: {apart}"


@pytest.mark.long
def test_a_plan_for_another_model_is_refused() -> None:
    whole, x, _ = model("mlp")
    plan = plan_hap(trace(whole, (x,)).graph, odd_cluster(random.Random(1)), "mlp", BATCH)
    with pytest.raises(ConfigError, match="for another model or batch"):
        run_ranks(
            "support.hap_ranks:everything", RANKS, _mixed(plan), timeout_s=100, paths=(TESTS,), forked=True
        )


def _mixed(plan: HapPlan) -> dict[str, Any]:
    return {"cases": [{"kind": "experts", "loss": False, "plan": plan}]}
