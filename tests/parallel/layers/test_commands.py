"""The command on split layers: the example, the list of protocols, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.runs import SCRIPTS
from support.shell import Shell

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "row_split_digits.py"


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"^epoch \d+: accuracy ([\d.]+)", text, re.M)]


@pytest.mark.long
def test_the_example_learns_split_and_alone(shell: Shell) -> None:
    done = shell("train", EXAMPLE, "--mesh", "model=2")
    assert done.code == 0, done.err
    split = accuracies((shell.runs / "latest" / "logs" / "rank0.log").read_text())
    command = [sys.executable, EXAMPLE]
    alone = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert min(split[-1], accuracies(alone.stdout)[-1]) > 0.85  # batches are shuffled otherwise
    page = shell.runs / "report.html"
    assert shell("report", shell.runs / "latest", "--out", page).code == 0
    assert "model 1" in page.read_text()
    assert "along model" in page.read_text()


def test_it_is_listed_with_promise_and_paper(shell: Shell) -> None:
    [listed] = [each for each in shell("protocols", "--json").json if each["name"] == "row_split"]
    assert listed["family"] == "split"
    assert "any number of workers" in listed["promise"]
    assert "Shrivastava" in listed["paper"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--mesh", "model=3", "--workers", 4), "3 places, but there are 4 workers. Use --workers 3"),
        (("--mesh", "model=2", "-p", "row_split", "--set", "mode=sum"), "mode"),
        (("--mesh", "model=2", "-p", "row_split", "--set", "every=-1"), "every >= 0"),
        (("--mesh", "model=2", "-p", "rowsplit"), "unknown protocol"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_started(
    shell: Shell, args: tuple[object, ...], said: str
) -> None:
    done = shell("train", SCRIPTS / "rows.py", *args)
    assert done.code == 2
    assert said in done.error
    assert not list(shell.runs.glob("*/logs"))
