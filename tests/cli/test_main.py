"""The command itself: what it says of itself."""

from __future__ import annotations

from pathlib import Path

import paceline
from support.command import run_command


def test_the_version_needs_no_command(tmp_path: Path) -> None:
    done = run_command("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{paceline.__version__}\n")


def test_without_a_command_it_shows_the_commands(tmp_path: Path) -> None:
    done = run_command(cwd=tmp_path)
    assert done.returncode == 2
    assert "train" in done.stdout + done.stderr
