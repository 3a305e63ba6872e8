"""`paceline bench plans`: the planners' speed, and what their plans are worth on real processes."""

from __future__ import annotations

from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.plans.hap import hap
from paceline_bench.plans.osdp import osdp
from paceline_bench.plans.search import searches


def plans(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Searches, then HAP, then OSDP."""
    return [*searches(plan, say), *hap(plan, say), *osdp(plan, say)]
