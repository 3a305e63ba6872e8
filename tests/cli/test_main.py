"""The command itself: what it says of itself, its help, and the first steps of a newcomer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import typer

import paceline
from paceline.cli.bench import bench
from support.command import run_command


def test_the_version_needs_no_command(tmp_path: Path) -> None:
    done = run_command("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{paceline.__version__}\n")


def test_without_a_command_it_says_what_to_do_next(tmp_path: Path) -> None:
    done = run_command(cwd=tmp_path)
    assert done.returncode == 0
    assert "paceline example digits.py" in done.stdout
    assert "newest run" not in done.stdout, "there is none here"


def test_without_a_command_it_names_the_newest_run(tmp_path: Path) -> None:
    (tmp_path / "runs/a1").mkdir(parents=True)
    (tmp_path / "runs/latest").symlink_to("a1")
    assert "The newest run is a1. Draw it: paceline report runs/latest" in run_command(cwd=tmp_path).stdout


def test_ctrl_c_while_a_command_loads_is_one_word(tmp_path: Path) -> None:
    """Python's own start, before the command's first line, cannot be caught."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = run_command("--help", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_no_line_about_a_command_is_cut_off(tmp_path: Path) -> None:
    shown = run_command("--help", cwd=tmp_path).stdout
    assert "train " in shown
    assert not [line for line in shown.splitlines()[1:] if line.endswith("...")]


def test_help_explains_the_flags_of_every_day_and_names_the_others(tmp_path: Path) -> None:
    shown = run_command("train", "--help", cwd=tmp_path).stdout
    assert "Worker processes to start." in shown
    assert "--damping" in shown
    assert "Give a stale gradient less weight" not in shown
    assert len(shown.splitlines()) < 75


@pytest.mark.parametrize("command", ["train", "compare", "simulate"])
def test_help_all_explains_every_flag_that_help_names(command: str, tmp_path: Path) -> None:
    brief = run_command(command, "--help", cwd=tmp_path).stdout
    everything = run_command(command, "--help-all", cwd=tmp_path).stdout
    named = {word.rstrip(",") for word in brief.split() if word.startswith("--") and word.strip("-")}
    assert len(named) > 20
    assert not {flag for flag in named - {"--help-all", "--"} if flag not in everything}


def test_help_all_after_two_dashes_is_the_scripts(tmp_path: Path) -> None:
    done = run_command("train", "missing.py", "--", "--help-all", cwd=tmp_path)
    assert (done.returncode, done.stderr[:6]) == (2, "error:")


def test_the_example_is_a_script_that_trains(tmp_path: Path) -> None:
    assert run_command("example", "mine.py", cwd=tmp_path).returncode == 0
    done = run_command(
        "train", "mine.py", "--workers", "1", "--", "--epochs", "1", cwd=tmp_path, timeout_s=90
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stderr


def test_the_example_names_a_folder_that_is_missing(tmp_path: Path) -> None:
    done = run_command("example", "no/digits.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no folder no. Make it first: mkdir -p no" in done.stderr


def test_a_simulation_says_how_to_draw_it_and_that_nobody_is_at_work(tmp_path: Path) -> None:
    done = run_command("simulate", "--workers", 2, "--iterations", 5, cwd=tmp_path)
    assert f"draw it: paceline report {done.stdout.strip()}" in done.stderr
    done = run_command("why", "runs/latest", cwd=tmp_path)
    assert done.returncode == 2
    assert "is a simulation without a script: no worker is at work" in done.stderr


def test_the_example_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text("mine")
    done = run_command("example", cwd=tmp_path)
    assert (done.returncode, (tmp_path / "digits.py").read_text()) == (2, "mine")
    assert "digits.py exists already" in done.stderr


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


def test_benchmarks_that_are_not_installed_are_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "paceline_bench"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        sys, "path", [each for each in sys.path if not (Path(each) / "paceline_bench").exists()]
    )
    with pytest.raises(typer.Exit) as exit_:
        bench(["death"])
    assert exit_.value.exit_code == 2
    assert (
        "the benchmarks are not installed: they are in the folder bench/ of a checkout"
        in capsys.readouterr().err
    )
