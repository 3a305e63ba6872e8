"""The advice about a strategy, for people."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from paceline.plan.profile.units import size_text
from paceline.plan.strategy.advice import StrategyAdvice


def advice_table(advice: StrategyAdvice) -> Group:
    """The choice first, then all strategies."""
    table = Table("strategy", "samples/s", "from", "memory", "fits", "sent per step", "accuracy at risk")
    for row in advice.rows:
        table.add_row(
            row.strategy,
            f"{row.samples_per_s:.1f}",
            "measured" if row.measured else "formula",
            size_text(row.memory_bytes),
            "yes" if row.fits else "no",
            size_text(row.sent_bytes),
            row.risk,
        )
    lines = [f"advice: {advice.choice} (rule {advice.rule}: {advice.because})", f"  {advice.command}"]
    return Group(*lines, *advice.hints, table)
