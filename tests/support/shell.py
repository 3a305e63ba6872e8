"""The `paceline` command in this process: all of its code, but an engine that is warm already."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from typer.testing import CliRunner

from paceline.cli.main import app
from support.command import error_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from paceline.engines.local import LocalEngine
    from support.runs import Lab


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that tells what went wrong."""
        lines = error_lines(self.err)
        assert len(lines) == 1, f"not one error line:\n{self.err}"
        return lines[0].removeprefix("error: ")

    @property
    def json(self) -> Any:
        """The one JSON document on standard output."""
        return msgspec.json.decode(self.out)


class Shell:
    """Runs commands; their runs go to a folder of the test's own."""

    def __init__(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = lab.root / "runs"

        @contextmanager
        def lent(script: str | None = None) -> Iterator[LocalEngine]:
            yield lab.engine

        monkeypatch.setattr("paceline.engines.local.LocalEngine", lent)
        monkeypatch.setenv("COLUMNS", "200")

    def __call__(self, command: str, *args: object) -> Outcome:
        runs = (
            ()
            if command not in ("train", "compare", "replay", "simulate") or "--runs" in args
            else ("--runs", self.runs)
        )
        result = CliRunner().invoke(app, [command, *map(str, (*runs, *args))])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)
