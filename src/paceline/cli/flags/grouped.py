"""How a command shows its flags and takes them from a file; main.py gives every command this class.

`--help` shows the flags of every day, and names the others by group; `--help-all` explains all of them.
A command with few flags shows all of them at once.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from paceline.cli.flags.host_options import GROUPS

EVERYDAY = (
    "workers",
    "protocol",
    "protocols",
    "set_",
    "cluster",
    "iterations",
    "slow",
    "balance",
    "seed",
    "target",
    "checkpoint_every",
    "resume",
    "report",
    "json",
)
"""The flags that `--help` explains where a command has many."""
MANY = 16
OTHER = "Options"
HELP_ALL = "--help-all"


class GroupedCommand(TyperCommand):
    """A command whose help comes in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As usual, after a look for --help-all, which explains every flag."""
        own = args[: args.index("--")] if "--" in args else args
        if HELP_ALL in own:
            ctx.meta[HELP_ALL] = True
            print(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def _has_many(self) -> bool:
        return sum(each.param_type_name == "option" for each in self.params) > MANY

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then flags: those of every day, or all of them in their groups."""
        arguments = [each for each in self.get_params(ctx) if each.param_type_name == "argument"]
        _write(formatter, "Arguments", ctx, arguments)
        groups = self._groups(ctx)
        if not self._has_many() or HELP_ALL in ctx.meta:
            for title, flags in groups.items():
                _write(formatter, title, ctx, flags)
            return
        shown = [flag for flags in groups.values() for flag in flags if _is_everyday(flag)]
        _write(formatter, "Flags of every day", ctx, sorted(shown, key=_everyday_place))
        _name_others(formatter, ctx, groups)

    def _groups(self, ctx: Any) -> dict[str, list[Any]]:
        """The flags by the title of their group: what all commands share in one order, then others."""
        groups: dict[str, list[Any]] = {title: [] for title in GROUPS}
        for each in self.get_params(ctx):
            if each.param_type_name == "option":
                title = getattr(each, "rich_help_panel", None) or OTHER
                groups.setdefault(title, []).append(each)
        return {
            title: groups[title]
            for title in sorted(groups, key=lambda title: title == OTHER)
            if groups[title]
        }


class GroupedCommands(TyperGroup):
    """The `paceline` command itself: its subcommands by what they are for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One section for each group, in the order in which main.py adds them."""
        sections: dict[str, list[tuple[str, str]]] = {}
        width = formatter.width - 6 - max(map(len, self.commands))
        for name, command in self.commands.items():
            title = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(title, []).append((name, command.get_short_help_str(width)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _is_everyday(flag: Any) -> bool:
    return flag.name in EVERYDAY or flag.name == "help"


def _everyday_place(flag: Any) -> int:
    return EVERYDAY.index(flag.name) if flag.name in EVERYDAY else len(EVERYDAY)


def _write(formatter: Any, title: str, ctx: Any, params: list[Any]) -> None:
    records = [record for each in params if (record := each.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


def _name_others(formatter: Any, ctx: Any, groups: dict[str, list[Any]]) -> None:
    """One line for each group: the names of the flags that only --help-all explains."""
    rest = {
        title: "  ".join(flag.opts[-1] for flag in flags if not _is_everyday(flag) and not flag.hidden)
        for title, flags in groups.items()
    }
    with formatter.section(f"More flags, which {HELP_ALL} explains"):
        formatter.write_dl([(title, names) for title, names in rest.items() if names])
