"""OSDP's plan at half the memory between all sharded and all replicated, against FSDP, on a throttled link.

Four workers on one host of a testbed whose loopback is throttled: an emulated link, real processes, FSDP2 on
both sides. Both sides share every layer's boundaries; FSDP is the plan that shards all of them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import RunError
from paceline.plan.osdp.plan import OsdpPlan
from paceline.plan.osdp.scheduler import plan_osdp
from paceline.plan.profile import load_cluster_profile, load_model_profile
from paceline.plan.profile.files import write_json
from paceline.plan.profile.units import MIB, size_text
from paceline.testbed import BedHost, HostSpec, Testbed, why_not
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stats import paired_ratio, spread
from paceline_bench.harness.throttle import throttle
from paceline_bench.plans import model
from paceline_bench.plans.hap import PATIENCE_S, trained

WORKERS, FASTER = 4, 1.15
OVERHEAD = 64 * MIB
"""What a worker takes beside its tensors: buffers of gloo and of FSDP2's copies."""
PUBLISHED = "published ratios: 1.22 (GPT-2) and 2.78 (OPT)"


def osdp(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """In turns, on a link of known speed."""
    if (reason := why_not()) is not None:
        say(f"no throttled link: {reason}")
        return []
    mbit = 1000
    sizes = ["wide", "64", "4", "4", "4"] if plan.quick else ["wide", "1024", "6", "4", "10"]
    with Testbed.up({"a": HostSpec()}) as bed, tempfile.TemporaryDirectory(prefix="paceline-bench-") as made:
        folder, host = Path(made), bed["a"]
        throttle(host, mbit)
        half, fsdp = _plans(host, folder, sizes)
        ours, theirs = [], []
        for _ in range(1 if plan.quick else 2):
            ours.append(_run(host, folder, half, sizes))
            theirs.append(_run(host, folder, fsdp, sizes))
    return _rows(half, ours, theirs, mbit, plan, say)


def _plans(host: BedHost, folder: Path, sizes: list[str]) -> tuple[OsdpPlan, OsdpPlan]:
    """Measured on the host: the plan half-way, and the one that shards everything."""
    _command(host, ["profile", "--cluster", "--workers", str(WORKERS), "--out", str(folder / "cluster.json")])
    _command(host, ["profile", model.__file__, "--out", str(folder / "model.json"), "--", *sizes])
    cluster = msgspec.structs.replace(load_cluster_profile(folder / "cluster.json"), overhead_bytes=OVERHEAD)
    profile, batch = load_model_profile(folder / "model.json"), int(sizes[3])
    free = plan_osdp(profile, cluster, batch=batch)
    limit = (free.replicated.memory_bytes + free.sharded.memory_bytes) // 2
    return (
        plan_osdp(profile, cluster, limit, batch),
        plan_osdp(profile, cluster, batch=batch, modes=("zdp",)),
    )


def _command(host: BedHost, words: list[str]) -> None:
    done = host.run([sys.executable, "-m", "paceline", *words], timeout_s=PATIENCE_S)
    if done.returncode:
        raise RunError(f"`paceline {' '.join(words[:2])}` did not run: {done.stderr.strip()[-300:]}")


def _run(host: BedHost, folder: Path, plan: OsdpPlan, sizes: list[str]) -> dict[str, Any]:
    file = folder / "plan.json"
    write_json(file, plan)
    return trained(["--plan", str(file), "--runs", str(folder)], sizes, host.command)


def _rows(
    half: OsdpPlan,
    ours: list[dict[str, Any]],
    theirs: list[dict[str, Any]],
    mbit: int,
    plan: BenchPlan,
    say: Say,
) -> list[BenchRow]:
    steps, others = ([r["measured"]["step_s"] for r in results] for results in (ours, theirs))
    peak = max(size for result in ours for size in result["measured"]["peak_bytes"])
    value, interval = paired_ratio(others, steps, plan.seed)
    where = f"4 workers, emulated link of {mbit} Mbit/s"
    faster = BenchRow(
        case={"measured": "whole steps", "planner": "osdp", "model": "wide layers", "for": where},
        measured={"paceline": spread(steps), "fsdp": spread(others)},
        figure="ratio",
        value=value,
        interval=interval if len(steps) > 1 else None,
        target=None if plan.quick else FASTER,
        remark=f"predicted {half.sharded.seconds / half.predicted.seconds:.2f}x; {PUBLISHED}",
    )
    fits = BenchRow(
        case={"measured": "peak memory", "planner": "osdp", "model": "wide layers", "for": where},
        measured={"paceline": spread(steps)},
        figure="share",
        value=peak / half.limit_bytes,
        target=None if plan.quick else 1.0,
        remark=f"measured {size_text(peak)}, predicted {size_text(half.predicted.memory_bytes)}, limit "
        f"{size_text(half.limit_bytes)}",
    )
    say(f"plans, OSDP half-way: {faster.shown} the samples/s of FSDP; peak {fits.shown} of the limit")
    return [faster, fits]
