"""`paceline report`: one HTML file about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as o
from paceline.cli.common import errors_for_people, print_json


def report(
    run: Annotated[list[Path], typer.Argument(help="Run folders, such as runs/latest.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    json: o.Json = False,
) -> None:
    """Draw runs: loss and accuracy over time, who computed and who waited, staleness, throughput.

    The file needs no network to open.
    """
    with errors_for_people():
        from paceline.errors import ConfigError
        from paceline.trace.life import read_tally
        from paceline.view.report.report import write_report

        try:
            page = write_report(run, out)
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}.") from None
        if json:
            print_json({"report": str(page), "runs": [read_tally(path).result() for path in run]})
        else:
            print(f"report: {page}")
