"""`paceline report`: one HTML file about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import errors_for_people, print_json


def report(
    run: Annotated[
        list[Path], typer.Argument(help="Run folders, such as runs/latest, or files of `paceline plan`.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    json: o.Json = False,
) -> None:
    """Draw runs as an HTML page: accuracy, waits, staleness.

    Loss and accuracy over time, who computed and who waited, staleness, throughput.

    Of plans and runs with --plan: the program or the operators, ratios, memory, predicted and measured. The
    file needs no network to open.
    """
    with errors_for_people():
        from paceline.errors import ConfigError
        from paceline.trace.life import read_tally
        from paceline.view.report.planned import is_planned, read_planned, write_planned
        from paceline.view.report.report import write_report

        try:
            planned = any(map(is_planned, run))
            page = write_planned(run, out) if planned else write_report(run, out)
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}.") from None
        if json:
            results = [read_planned(p).result if planned else read_tally(p).result() for p in run]
            print_json({"report": str(page), "runs": results})
        else:
            print(f"report: {page}")
