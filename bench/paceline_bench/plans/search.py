"""How long planners search: OSDP on a thousand operators, HAP on a deep transformer and unequal devices."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from paceline.plan.hap.plan import plan_hap
from paceline.plan.hap.trace import trace
from paceline.plan.osdp.scheduler import plan_osdp
from paceline.plan.profile import ClusterProfile, Device, ModelProfile, Operator, TransferCost
from paceline.plan.profile.units import GIB, MIB
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stats import spread
from paceline_bench.plans.model import Letters

OSDP_TARGET_S, HAP_TARGET_S = 1.0, 30.0
LAYER_MIB = (4, 12, 4, 16, 16)
"""What the layers of a transformer block of width 1024 hold, about."""


def searches(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """All of them."""
    count = 30 if plan.quick else 1000
    rows = [_osdp(kind, count, batch, plan, say) for kind in ("alike", "random") for batch in (8, None)]
    return [*rows, _hap(plan, say)]


def _osdp(kind: str, count: int, batch: int | None, plan: BenchPlan, say: Say) -> BenchRow:
    model, cluster = _model(kind, count, plan.seed), _equal(8)
    ends = plan_osdp(model, cluster, batch=1)
    half = (ends.replicated.memory_bytes + ends.sharded.memory_bytes) // 2
    seen = _times(lambda: plan_osdp(model, cluster, half, batch=batch), 1 if plan.quick else 3)
    sizes = "one batch size" if batch else "all batch sizes"
    row = BenchRow(
        case={"measured": "search", "planner": "osdp", "model": f"{count} operators, {kind}", "for": sizes},
        measured={"paceline": spread(seen)},
        figure="seconds",
        value=min(seen),
        target=None if plan.quick else OSDP_TARGET_S,
        remark="limit half-way between all sharded and all replicated",
    )
    say(f"plans, OSDP on {count} operators ({kind}), {sizes}: {row.shown}")
    return row


def _hap(plan: BenchPlan, say: Say) -> BenchRow:
    layers, width = (2, 32) if plan.quick else (24, 256)
    model, cluster = Letters(width, layers, 4), _unequal()
    batch = torch.zeros(64, model.length, dtype=torch.long)
    seen = _times(
        lambda: plan_hap(trace(model, (batch,)).graph, cluster, "letters", 64), 1 if plan.quick else 2
    )
    row = BenchRow(
        case={
            "measured": "search",
            "planner": "hap",
            "model": f"transformer, {layers} layers",
            "for": "8 devices",
        },
        measured={"paceline": spread(seen)},
        figure="seconds",
        value=min(seen),
        target=None if plan.quick else HAP_TARGET_S,
        remark="tracing included; two devices of speed 4, two of 2, four of 1",
    )
    say(f"plans, HAP on a transformer of {layers} layers: {row.shown}")
    return row


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    seen = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seen.append(time.perf_counter() - began)
    return seen


def _model(kind: str, count: int, seed: int) -> ModelProfile:
    draw = random.Random(seed)

    def size(place: int) -> int:
        return LAYER_MIB[place % len(LAYER_MIB)] * MIB if kind == "alike" else draw.randint(1, 64 * MIB)

    made = []
    for place in range(count):
        own, name = size(place), f"layer{place}"
        made.append(
            Operator(name=name, parameter_bytes=own, activation_bytes=own / 50, per_sample_s=own / 1e12)
        )
    return ModelProfile(model="made up", operators=tuple(made))


def _equal(count: int) -> ClusterProfile:
    device = Device(name="device", flops_per_s=1e13, memory_bytes=80 * GIB)
    return ClusterProfile(devices=(device,) * count, link=TransferCost(latency_s=2e-5, bytes_per_s=2.5e9))


def _unequal() -> ClusterProfile:
    speeds = [4e12] * 2 + [2e12] * 2 + [1e12] * 4
    devices = tuple(Device(name="device", flops_per_s=f, memory_bytes=32 * GIB) for f in speeds)
    return ClusterProfile(devices=devices, link=TransferCost(latency_s=2e-5, bytes_per_s=2.5e9))
