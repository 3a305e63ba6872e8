"""`paceline train --plan`: a script on workers that hold the model as a plan says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paceline.cli.running.common import heed_termination, print_json

KNOWN = {"script", "args", "workers", "seed", "clip_norm", "plan", "plan_cluster", "runs", "json"}
EMULATED = {"slow", "device_time", "jitter"}
"""What HAP programs can do: their operations are known."""


def train_planned(
    chosen: dict[str, Any], file: Path, now: Path | None, typed: set[str], runs: Path, json: bool
) -> None:
    """Run it, and show what was predicted beside what happened. `now`: a file about the cluster as it is."""
    import msgspec
    from rich.console import Console

    from paceline.cli.train import make_config
    from paceline.errors import ConfigError
    from paceline.parallel.plans.train import planned_elsewhere, train_with_plan
    from paceline.plan.files import read_plan
    from paceline.plan.profile import load_cluster_profile

    for flag in sorted(typed - KNOWN - EMULATED):
        raise ConfigError(f"--{flag.replace('_', '-')} has no meaning with --plan. Leave it out.")
    planner, plan = read_plan(file)
    for flag in sorted(typed & EMULATED if planner != "hap" else ()):
        raise ConfigError(f"--{flag.replace('_', '-')} emulates devices for HAP plans only. Leave it out.")
    cluster = None if now is None else load_cluster_profile(now)
    if "workers" not in typed:
        chosen["workers"] = plan.workers
    config = make_config(chosen, runs)
    config = msgspec.structs.replace(config, protocol=None)
    console = Console(stderr=True, highlight=False)
    if (text := planned_elsewhere(plan)) is not None and not config.emulated:
        print(f"warning: {text}", file=sys.stderr)
    heed_termination()
    with console.status(f"{planner} plan on {config.workers} workers; see {config.path / 'logs'}"):
        result = train_with_plan(config, file, cluster)
    for warning in result["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    if json:
        print_json(result)
    else:
        console.print(summary(result, plan))
        print(config.folder)


def summary(result: dict[str, Any], plan: Any) -> Any:
    """Predicted and measured, side by side."""
    from rich.table import Table

    from paceline.plan.profile.units import size_text, time_text
    from paceline.view import figures

    table = Table("", "predicted", "measured", title=_title(result), title_justify="left")
    predicted, measured = result["predicted"], result["measured"]
    step = measured["step_s"]
    table.add_row("step", time_text(predicted["step_s"]), "-" if step is None else time_text(step))
    peaks = [size for size in measured["peak_bytes"] if size is not None]
    most = size_text(max(peaks)) if peaks else "-"
    table.add_row("peak memory per rank", size_text(predicted["peak_bytes"]), most)
    if result["protocol"] == "osdp":
        table.add_row("limit", size_text(plan.limit_bytes), "")
    table.add_row("samples", "", figures.done_of(result["samples"], result["samples_due"]))
    rate = result["samples_per_s"]
    table.add_row("samples/s", f"{plan.predicted.samples_per_s:.1f}", "-" if rate is None else f"{rate:.1f}")
    return table


def _title(result: dict[str, Any]) -> str:
    return f"{result['protocol']} plan" + (", emulated devices" if result["emulated"] else "")
