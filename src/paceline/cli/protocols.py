"""`paceline protocols`: what there is, and what it promises."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import errors_for_people, print_json

if TYPE_CHECKING:
    from paceline.protocols.settings import About


def protocols(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show one protocol with all it says of itself; one of your own as my_rules.py:HalfWay."
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """List the protocols, what they promise and their papers.

    Those that installed packages offer (entry points of the group paceline.protocols) stand at the end.
    """
    with errors_for_people():
        from paceline.parallel.registry import SPLITS, about_split
        from paceline.protocols.own import canonical
        from paceline.protocols.settings import about

        if name in SPLITS:
            entries = [about_split(name)]
        else:
            entries = [about(canonical(name))] if name else _all()
        if json:
            print_json(entries[0] if name else entries)
        else:
            _show(entries, whole=name is not None)


def _all() -> list[About]:
    """Those of the package, then those of others; one that cannot be loaded is told of, and left out."""
    from paceline.errors import ConfigError
    from paceline.parallel.registry import SPLITS, about_split
    from paceline.protocols import PACED, PEERS, own
    from paceline.protocols.settings import about

    entries = [about(each) for each in (*sorted(PACED), *sorted(PEERS))]
    for name, value in sorted(own.offered().items()):
        if name in PACED or name in PEERS:
            print(f"warning: {value} is offered as {name!r}, which is Paceline's own.", file=sys.stderr)
            continue
        try:
            entries.append(about(name))
        except ConfigError as error:
            print(f"warning: {error}", file=sys.stderr)
    return entries + [about_split(each) for each in sorted(SPLITS)]


def _show(entries: list[About], whole: bool) -> None:
    from rich.console import Console
    from rich.padding import Padding

    console = Console(highlight=False)
    for entry in entries:
        console.print(f"[bold]{entry.name}[/] ({entry.family})  {entry.title}")
        told = {
            "promise": entry.promise,
            "use it when": entry.when,
            "paper": entry.paper,
            "from": entry.source,
        }
        lines = [f"{word}: {text}" for word, text in told.items() if text]
        lines += [f"--set {s.name}={s.default}  {s.help}" for s in entry.settings]
        for line in lines:
            console.print(Padding(line, (0, 0, 0, 2)), markup=False)
        if whole and entry.body:
            console.print(Padding(entry.body, (1, 0, 0, 2)), markup=False)
