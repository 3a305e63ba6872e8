"""The `paceline` command. Each subcommand lives in its own file and imports what it needs when called."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from paceline.cli import advise, plan, testbed, tune
from paceline.cli.bench import bench
from paceline.cli.compare import compare
from paceline.cli.doctor import doctor
from paceline.cli.host import host
from paceline.cli.profile import profile
from paceline.cli.protocols import protocols
from paceline.cli.replay import replay
from paceline.cli.report import report
from paceline.cli.running.common import DEBUG
from paceline.cli.running.secret import secret
from paceline.cli.running.utf8 import use_utf8
from paceline.cli.simulate import simulate
from paceline.cli.train import train
from paceline.cli.why import why
from paceline.errors import ConfigError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train one PyTorch model on many workers, and choose how they keep time.",
)


def _version(asked: bool) -> None:
    if asked:
        from paceline import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train one PyTorch model on many workers, and choose how they keep time."""
    if debug:
        os.environ[DEBUG] = "1"


class Scripted(TyperCommand):
    """A command that starts a script, whose options people tend to give to the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As ever, but an option that is not ours may be the script's."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # of click, or of the click that typer brings along
            if type(error).__name__ == "NoSuchOption" and not getattr(error, "possibilities", None):
                error.message += ". What is meant for the script comes after --"  # type: ignore[attr-defined]
            raise


COMMANDS = (train, host, secret, compare, simulate, replay, protocols, report, why, profile, bench, doctor)
for command in COMMANDS:
    app.command(cls=Scripted if command in (train, compare, simulate) else None)(command)
app.add_typer(advise.app, name="advise")
app.add_typer(plan.app, name="plan")
app.add_typer(tune.app, name="tune")
app.add_typer(testbed.app, name="testbed")


def main() -> None:
    """Entry point."""
    try:
        use_utf8()
        app()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
