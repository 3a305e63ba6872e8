"""Plan files: which planner made one, and what it says."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ConfigError
from paceline.plan.hap.plan import HapPlan, load_hap_plan
from paceline.plan.osdp.plan import OsdpPlan, load_plan
from paceline.plan.profile.files import read_table

Plan = OsdpPlan | HapPlan


def read_plan(file: Path) -> tuple[str, Plan]:
    """The planner's name, and its plan."""
    table = read_table(file, "plan")
    planner = table.get("planner") if isinstance(table, dict) else None
    if planner == "hap":
        return "hap", load_hap_plan(file)
    if planner == "osdp":
        return "osdp", load_plan(file)
    raise ConfigError(
        f"{file} is no plan (its planner is {planner!r}). Make one with `paceline plan osdp` or `plan hap`."
    )
