"""`paceline train --plan`: a script on workers that hold the model as a plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.cli.common import print_json

KNOWN = {"script", "args", "workers", "seed", "clip_norm", "plan", "runs", "json"}


def train_planned(chosen: dict[str, Any], file: Path, typed: set[str], runs: Path, json: bool) -> None:
    """Run it, and show what was predicted beside what happened."""
    import msgspec
    from rich.console import Console

    from paceline.cli.train import make_config
    from paceline.errors import ConfigError
    from paceline.parallel.plans.train import read_plan, train_with_plan

    for flag in sorted(typed - KNOWN):
        raise ConfigError(f"--{flag.replace('_', '-')} has no meaning with --plan. Leave it out.")
    planner, plan = read_plan(file)
    if "workers" not in typed:
        chosen["workers"] = plan.workers
    config = make_config(chosen, runs)
    config = msgspec.structs.replace(config, protocol=None)
    console = Console(stderr=True, highlight=False)
    with console.status(f"{planner} plan on {config.workers} workers; see {config.path / 'logs'}"):
        result = train_with_plan(config, file)
    if json:
        print_json(result)
    else:
        console.print(summary(result, plan))
        print(config.folder)


def summary(result: dict[str, Any], plan: Any) -> Any:
    """Predicted and measured, side by side."""
    from rich.table import Table

    from paceline.plan.profile.units import size_text, time_text

    table = Table("", "predicted", "measured", title=f"{result['protocol']} plan", title_justify="left")
    predicted, measured = result["predicted"], result["measured"]
    step = measured["step_s"]
    table.add_row("step", time_text(predicted["step_s"]), "-" if step is None else time_text(step))
    peaks = [size for size in measured["peak_bytes"] if size is not None]
    most = size_text(max(peaks)) if peaks else "-"
    table.add_row("peak memory per rank", size_text(predicted["peak_bytes"]), most)
    if result["protocol"] == "osdp":
        table.add_row("limit", size_text(plan.limit_bytes), "")
    rate = result["samples_per_s"]
    table.add_row("samples/s", f"{plan.predicted.samples_per_s:.1f}", "-" if rate is None else f"{rate:.1f}")
    return table
