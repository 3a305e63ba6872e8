"""`paceline advise`: what to choose for a model and a cluster, before or after a run."""

from __future__ import annotations

import typer

from paceline.cli.advise.staleness import staleness
from paceline.cli.advise.strategy import strategy

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Advice for a model and a cluster.")


@app.callback()
def advise() -> None:
    """Advice for a model and a cluster."""


app.command()(strategy)
app.command()(staleness)
