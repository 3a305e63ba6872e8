"""`--correct` on the command line: what it runs, what it says, what it refuses."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.config import RunConfig
from paceline.trace import read_trace
from paceline.trace.events import Note
from support.runs import SCRIPTS
from support.shell import Shell

SCRIPT = SCRIPTS / "train.py"
ARGS = ("--", "momentum", "--samples", 80, "--batch", 4, "--epochs", 2)


def notes(folder: str) -> str:
    return " ".join(event.text for event in read_trace(Path(folder)) if isinstance(event, Note))


def test_a_run_is_corrected_by_default_says_so_and_is_replayed_to_the_same_bits(shell: Shell) -> None:
    done = shell("train", SCRIPT, "-p", "asp", "-n", 3, *ARGS)
    assert done.code == 0, done.err
    assert "asp + dana" in done.err
    folder = done.out.strip()
    assert "correcting stale momentum with DANA" in notes(folder)
    result = msgspec.json.decode(Path(folder, "result.json").read_bytes())
    assert result["correct"] == "dana"
    again = shell("replay", folder, "--json")
    assert again.json["identical"] is True, again.err


def test_compare_has_a_row_for_each_correction_and_one_for_lockstep(shell: Shell, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    ways = ("--protocols", "bsp,asp", "--correct", "none,dana")
    done = shell("compare", SCRIPT, *ways, "-n", 2, "--json", "--report", page, *ARGS)
    assert done.code == 0, done.err
    rows = [(row["protocol"], row["correct"]) for row in done.json]
    assert rows == [("bsp", "none"), ("asp", "none"), ("asp", "dana")]
    assert "asp + dana" in page.read_text()


def test_simulations_of_a_script_are_corrected_and_those_of_sizes_are_not(shell: Shell) -> None:
    done = shell("simulate", SCRIPT, "-p", "asp,ssp", "--correct", "none,gap", "-n", 2, "--json", *ARGS)
    assert done.code == 0, done.err
    assert [row["correct"] for row in done.json] == ["none", "gap", "none", "gap"]
    timing = shell("simulate", "-p", "asp", "--correct", "dana", "-n", 2, "--json")
    assert timing.json["correct"] == "none"


@pytest.mark.parametrize(("flags", "said"), [(("-p", "local_sgd", "-n", 2), "ignored"), (("-n", 1), "plain")])
def test_who_has_no_store_ignores_a_correction_and_says_so(
    shell: Shell, flags: tuple[object, ...], said: str
) -> None:
    done = shell("train", SCRIPT, *flags, "--correct", "dana", *ARGS)
    assert done.code == 0, done.err
    assert "--correct" in notes(done.out.strip())
    assert said in notes(done.out.strip())


@pytest.mark.parametrize("command", ["train", "compare", "simulate"])
def test_a_name_that_means_nothing_is_a_mistake(shell: Shell, command: str) -> None:
    done = shell(command, SCRIPT, "--correct", "dna", *ARGS)
    assert done.code == 2
    assert "unknown correction of stale gradients 'dna'" in done.err


def test_runs_from_before_there_was_a_choice_are_plain() -> None:
    old = msgspec.json.decode(b'{"run": "r", "folder": "f"}', type=RunConfig)
    assert old.correct == "none"
