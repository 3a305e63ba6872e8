"""The command itself: what it says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import paceline
from support.command import run_command


def test_the_version_needs_no_command(tmp_path: Path) -> None:
    done = run_command("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{paceline.__version__}\n")


def test_without_a_command_it_shows_the_commands(tmp_path: Path) -> None:
    done = run_command(cwd=tmp_path)
    assert done.returncode == 2
    assert "train" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii"},
    ],
)
def test_names_that_are_not_ascii_can_be_used_in_any_locale(tmp_path: Path, locale: dict[str, str]) -> None:
    folder = tmp_path / "München"
    folder.mkdir()
    done = run_command("simulate", "--workers", 2, "--iterations", 5, "--runs", "löufe", cwd=folder, **locale)
    assert done.returncode == 0, done.stderr
    (trace,) = folder.glob("löufe/*-*/trace.jsonl")
    told = run_command("report", trace.parent, cwd=folder, **locale)
    assert told.returncode == 0, told.stderr


def test_a_name_that_is_not_utf8_is_refused_in_one_sentence(tmp_path: Path) -> None:
    done = run_command("report", os.fsdecode(b"caf\xe9"), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: the name 'caf\\udce9' is not UTF-8, in which a run is recorded. Rename the file or folder.\n"
    )
