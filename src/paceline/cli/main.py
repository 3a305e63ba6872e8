"""The `paceline` command. Each subcommand lives in its own file and imports what it needs when called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from paceline.cli import advise, plan, testbed, tune
from paceline.cli.bench import bench
from paceline.cli.compare import compare
from paceline.cli.doctor import doctor
from paceline.cli.flags.grouped import GroupedCommand, GroupedCommands
from paceline.cli.host import host
from paceline.cli.profile import profile
from paceline.cli.protocols import protocols
from paceline.cli.replay import replay
from paceline.cli.report import report
from paceline.cli.running.common import DEBUG, errors_for_people
from paceline.cli.running.secret import secret
from paceline.cli.running.utf8 import use_utf8
from paceline.cli.simulate import simulate
from paceline.cli.start import example, first_steps
from paceline.cli.train import train
from paceline.cli.why import why
from paceline.errors import ConfigError

app = typer.Typer(
    add_completion=False,
    cls=GroupedCommands,
    invoke_without_command=True,
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
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train one PyTorch model on many workers, and choose how they keep time."""
    if debug:
        os.environ[DEBUG] = "1"
    if context.invoked_subcommand is None:
        first_steps()


class Scripted(GroupedCommand):
    """A command that starts a script. Its flags may stand in a file, or be meant for the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As usual, but flags may come from a TOML file, and an unknown one may be the script's."""
        from paceline.cli.flags.from_file import SUFFIX, expand

        given = args
        with errors_for_people():
            args, ctx.default_map = expand(args, self.params)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # of click, or of the click that typer brings along
            if type(error).__name__ == "NoSuchOption" and not getattr(error, "possibilities", None):
                error.message += ". What is meant for the script comes after --"  # type: ignore[attr-defined]
            name = getattr(getattr(error, "param", None), "name", None)
            source = None if name is None else ctx.get_parameter_source(name)
            if source is not None and source.name == "DEFAULT_MAP":
                file = next(word for word in given if word.endswith(SUFFIX))
                error.message += f". {file} says {ctx.default_map[name]!r}"  # type: ignore[attr-defined]
            raise


SECTIONS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train": (train, compare, host, secret),
    "Look": (report, why, replay, protocols),
    "Plan": (simulate, profile),
    "This machine": (example, doctor, bench),
}
for title, commands in SECTIONS.items():
    for command in commands:
        kind = Scripted if command in (train, compare, simulate) else GroupedCommand
        app.command(cls=kind, rich_help_panel=title)(command)
app.add_typer(advise.app, name="advise", rich_help_panel="Plan")
app.add_typer(plan.app, name="plan", rich_help_panel="Plan")
app.add_typer(tune.app, name="tune", rich_help_panel="Plan")
app.add_typer(testbed.app, name="testbed", rich_help_panel="This machine")


def main() -> None:
    """The command, once it is loaded (see `__main__.py`)."""
    try:
        use_utf8()
        app()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
