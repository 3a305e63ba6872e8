"""`paceline why`: who waits for whom in a run, and where everybody is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import errors_for_people, print_json


def why(
    run: Annotated[Path, typer.Argument(help="The run's folder, such as runs/latest.")],
    json: o.Json = False,
) -> None:
    """Tell who a run waits for, and where every worker is.

    Who waits for whom, since when, and the Python stack of every worker.

    Training goes on undisturbed. Of a run that is over, it tells how it ended. Workers on other hosts are
    listed, without a stack: run the command there, in the same folder, if it is shared.
    """
    with errors_for_people():
        from paceline.errors import NoTrace
        from paceline.view.why import lines
        from paceline.view.why import why as look

        if not (run / "config.json").is_file() and (run / "trace.jsonl").is_file():
            raise NoTrace(
                f"{run} is a simulation without a script: no worker is at work. Look at it with: "
                f"paceline report {run}"
            )
        if not (run / "config.json").is_file():
            raise NoTrace(
                f"no run at {run}: there is no config.json. Name a run's folder, such as runs/latest."
            )
        told = look(run.resolve())
        if json:
            print_json(told)
        else:
            print("\n".join(lines(told)))
