"""`paceline compare`: the same script under several protocols, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from paceline.cli.flags import dials as d
from paceline.cli.flags import options as o
from paceline.cli.flags.dials import Dials, takes
from paceline.cli.running.common import (
    check_script,
    errors_for_people,
    parse_settings,
    print_json,
)
from paceline.cli.running.mesh import is_split
from paceline.cli.train import checked_protocol, make_config, warn_if_crowded
from paceline.corrections import parse_correction
from paceline.errors import ConfigError, RunError, RunStopped

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.trace import Result

BALANCED = "+balance"


@takes("workers", *d.RUN, *d.NUMBERS, "balance", "compress", *d.TROUBLE, workers=4)
def compare(
    script: o.Script,
    args: o.Args = None,
    protocols: Annotated[
        str,
        typer.Option(
            help="Comma separated; settings after colons, +balance for balanced batches, for instance "
            "bsp,bsp+balance,ssp:staleness=5,dssp,asp. One of your own: my_rules.py:HalfWay:near=3."
        ),
    ] = "bsp,ssp,dssp,asp",
    correct: o.EachCorrect = "auto",
    *,
    dials: Dials,
    balance: Annotated[
        bool,
        typer.Option(
            "--balance",
            help="One more run at the end, bsp+balance: every worker's batch in proportion to its "
            "measured speed (see train --help).",
            rich_help_panel=o.NUMBERS,
        ),
    ] = False,
    compress: o.EachCompress = "none",
    report: Annotated[Path | None, typer.Option(help="Where to write the HTML report.")] = None,
    runs: o.Runs = Path("runs"),
    json: o.Json = False,
) -> None:
    """Train SCRIPT under several protocols, side by side.

    Every run has the same seed, data and clock.

    Prints a table and writes a self-contained HTML report. A run that fails does not keep the others from
    their turn, and when it is stopped, what has finished is shown.

    Example: paceline compare digits.py --workers 4 --slow 3:2.5 --device-time 0.05 --target 0.95
    """
    with errors_for_people():
        check_script(script)
        wanted = parse_protocols(protocols, "--protocols")
        lockstep = Wanted("bsp", {}, balance=True)
        wanted += [lockstep] if balance and lockstep not in wanted else []
        wanted = with_corrections(with_each(wanted, compress), correct)
        for each in wanted:
            checked_protocol(each.name, each.settings, each.compress, dials["fabric"])
        shared = dials.asked() | {"script": str(script), "args": tuple(args or ())}
        warn_if_crowded(dials["workers"], dials["device_time"])
        _compare(shared, wanted, runs, report, json)


class Wanted(NamedTuple):
    """One of several runs."""

    name: str | None
    settings: dict[str, Any]
    balance: bool = False
    compress: str = "none"
    correct: str = "auto"

    @property
    def title(self) -> str:
        """As it would be typed, without its settings."""
        squeezed = "" if self.compress == "none" else f" {self.compress}"
        squeezed += "" if self.correct == "auto" else f" {self.correct}"
        return (self.name or "") + (BALANCED if self.balance else "") + squeezed

    @property
    def dials(self) -> dict[str, Any]:
        """As a run's configuration has it."""
        return {"protocol": self.name} | {name: getattr(self, name) for name in self._fields[1:]}


def parse_protocol(text: str) -> Wanted:
    """`ssp:staleness=5` is a protocol with settings; with `+balance` at its end, batches are balanced."""
    text = text.strip()
    name, *settings = text.removesuffix(BALANCED).split(":")
    if name.endswith(".py") and settings:  # a class in a file: my_rules.py:HalfWay:near=3
        from paceline.protocols.own import canonical

        name = canonical(f"{name}:{settings.pop(0)}")
    return Wanted(name, parse_settings(settings), text.endswith(BALANCED))


def parse_protocols(text: str, flag: str) -> list[Wanted]:
    """One or several, comma separated."""
    wanted = [parse_protocol(each) for each in text.split(",") if each.strip()]
    if not wanted:
        raise ConfigError(f"{flag} names no protocol, got {text!r}. For instance {flag} bsp,ssp.")
    return wanted


def with_each(wanted: list[Wanted], compress: str) -> list[Wanted]:
    """Every run with each of the ways to compress."""
    ways = [way.strip() for way in compress.split(",") if way.strip()] or ["none"]
    return [each._replace(compress=way) for each in wanted for way in ways]


def with_corrections(wanted: list[Wanted], correct: str) -> list[Wanted]:
    """Every run with each of the ways to correct; once, where no gradient can be stale."""
    ways = [way.strip() for way in correct.split(",") if way.strip()] or ["auto"]
    for way in ways:
        parse_correction(way)
    return [each._replace(correct=way) for each in wanted for way in (ways if _is_stale(each) else ways[:1])]


def _is_stale(wanted: Wanted) -> bool:
    from paceline.protocols import Peer
    from paceline.protocols.settings import make_any

    if wanted.name is None:
        return True
    if is_split(wanted.name):
        return False
    protocol = make_any(wanted.name, wanted.settings)
    return not isinstance(protocol, Peer) and not protocol.lockstep


def _compare(
    shared: dict[str, Any],
    wanted: list[Wanted],
    runs: Path,
    report: Path | None,
    json: bool,
) -> None:
    from rich.console import Console

    from paceline.cli.running.conduct import conduct
    from paceline.cli.running.ending import check_ranks
    from paceline.cli.running.engines import open_engine

    console = Console(stderr=True)
    finished: dict[Path, Result] = {}
    failures: list[tuple[str, RunError]] = []
    try:
        with open_engine(shared) as engine:
            for number, each in enumerate(wanted, 1):
                config = make_config(shared | each.dials, runs)
                console.print(f"[bold]{number}/{len(wanted)} {each.title}[/]", highlight=False)
                try:
                    finished[config.path] = result = conduct(engine, config)
                    check_ranks(config, result)
                except RunStopped:
                    raise
                except RunError as error:
                    failures.append((each.title, error))
                    console.print(f"failed: {error}", style="bold red", highlight=False, markup=False)
    finally:
        if finished:
            _show(finished, report, json, console)
    if failures:
        names, (_, first) = ", ".join(title for title, _ in failures), failures[0]
        raise RunError(f"not finished by all workers: {names}. Of the first: {first}")


def _show(finished: dict[Path, Result], report: Path | None, json: bool, console: Console) -> None:
    from paceline.view.report.report import write_report
    from paceline.view.terminal.table import print_comparison

    folders, results = list(finished), list(finished.values())
    page = write_report(folders, report or folders[-1].parent / "report.html")
    if json:
        print_json(results)
    else:
        print_comparison(results, console)
        print(f"report: {page}")
