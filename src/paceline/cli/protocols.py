"""`paceline protocols`: what there is, and what it promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as o
from paceline.cli.common import errors_for_people, print_json

if TYPE_CHECKING:
    from paceline.protocols.settings import About


def protocols(
    name: Annotated[str | None, typer.Argument(help="Show one protocol with all its settings.")] = None,
    json: o.Json = False,
) -> None:
    """List the protocols: name, family, paper, what each promises, and its settings."""
    with errors_for_people():
        from paceline.errors import unknown
        from paceline.parallel.registry import PIPELINES, about_split
        from paceline.protocols import PACED, PEERS
        from paceline.protocols.settings import about

        names = [*sorted(PACED), *sorted(PEERS), *sorted(PIPELINES)]
        if name is not None and name not in names:
            raise unknown("protocol", name, names)
        entries = [
            about_split(each) if each in PIPELINES else about(each) for each in ([name] if name else names)
        ]
        if json:
            print_json(entries[0] if name else entries)
        else:
            _show(entries)


def _show(entries: list[About]) -> None:
    from rich.console import Console
    from rich.padding import Padding

    console = Console(highlight=False)
    for entry in entries:
        console.print(f"[bold]{entry.name}[/] ({entry.family})  {entry.title}")
        lines = [f"promise: {entry.promise}", f"paper: {entry.paper}"]
        lines += [f"--set {s.name}={s.default}  {s.help}" for s in entry.settings]
        for line in lines:
            console.print(Padding(line, (0, 0, 0, 2)), markup=False)
