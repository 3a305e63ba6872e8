"""`paceline tune switch`, with runs that are only pretended."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.tune import app
from paceline.config import RunConfig
from paceline.errors import RunError
from paceline.protocols.paced.phases import parse_phases
from paceline.trace import Result, Tally
from paceline.trace.events import SCHEMA, Decided, Evaluated, RunEnded, RunStarted


class Lab:
    """Stands in for training: accurate from a share of 0.2 on, and diverges below 0.1."""

    def __init__(self) -> None:
        self.runs: list[RunConfig] = []

    def conduct(self, engine: Any, config: RunConfig) -> Result:
        self.runs.append(config)
        share = parse_phases(config.settings["phases"])[0].end or 0.0
        tally = Tally()
        tally.add(RunStarted(0.0, SCHEMA, config.run, "sync_switch", {}, config.workers, 0, True, ""))
        tally.add(Evaluated(1.0, 0, 1, 64, {"accuracy": 0.9 if share >= 0.2 else 0.5}))
        tally.add(Decided(10 + 90 * share, 1, 0, 1, fate="apply", samples=640))
        if share < 0.1:
            raise RunError("NaN or infinity")
        tally.add(RunEnded(10 + 90 * share, "finished"))
        return tally.result()


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lab:
    lab = Lab()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trains')")
    failed = Tally()
    failed.add(RunStarted(0.0, SCHEMA, "", "sync_switch", {}, 4, 0, True, ""))
    failed.add(RunEnded(5.0, "failed"))
    monkeypatch.setattr("paceline.cli.running.conduct.conduct", lab.conduct)
    monkeypatch.setattr("paceline.cli.running.conduct.write_result", lambda folder: failed.result())
    monkeypatch.setattr("paceline.engines.local.LocalEngine", lambda script: nullcontext())
    return lab


def ask(*args: str) -> Any:
    return CliRunner().invoke(app, ["switch", *args], catch_exceptions=False)


def test_the_answer_is_the_least_share_that_is_enough_and_how_to_use_it(lab: Lab) -> None:
    done = ask("train.py", "--workers", "4", "--settings", "4", "--runs-each", "2")
    assert done.exit_code == 0
    assert done.stdout.strip() == "paceline train train.py --protocol sync_switch --set phases=bsp@0.25,asp"
    assert "25 % BSP is enough" in done.stderr
    shares = [parse_phases(run.settings["phases"])[0].end for run in lab.runs]
    assert shares == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1875, 0.1875]


def test_every_run_is_an_exact_simulation_of_the_cluster_with_a_seed_of_its_own(lab: Lab) -> None:
    ask(
        "train.py", "--slow", "1:2.5", "--seed", "7", "--settings", "1", "--runs-each", "2", "--", "--lr", "1"
    )
    assert [run.seed for run in lab.runs] == [7, 8, 7, 8]
    assert {run.args for run in lab.runs} == {("--lr", "1")}
    assert all(run.cluster is not None and run.cluster["slow"] == {"1": 2.5} for run in lab.runs)
    assert [run.settings["total"] for run in lab.runs] == [0, 640, 640, 640]


def test_real_runs_have_no_cluster_but_what_is_emulated(lab: Lab) -> None:
    ask(
        "train.py",
        "--real",
        "--slow",
        "1:2.5",
        "--compute-time",
        "0.05",
        "--settings",
        "1",
        "--runs-each",
        "1",
    )
    for run in lab.runs:
        assert (run.cluster, run.workers, run.slow, run.device_time_s) == (None, 4, {1: 2.5}, 0.05)


def test_what_is_known_is_told_at_once_unless_asked_again(lab: Lab) -> None:
    question = ("train.py", "--settings", "2", "--runs-each", "1", "--json")
    first = ask(*question)
    made = len(lab.runs)
    again = ask(*question)
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert "known from runs/tuned.json" in again.stderr
    assert len(lab.runs) == made
    ask(*question, "--again")
    assert len(lab.runs) == 2 * made
    ask(*question, "--workers", "5")
    assert len(lab.runs) == 3 * made


def test_a_failed_run_counts_as_diverged_and_says_so(lab: Lab) -> None:
    done = ask("train.py", "--settings", "4", "--runs-each", "1", "--tolerance", "0.6", "--json")
    assert done.exit_code == 0
    assert "counts as diverged: NaN or infinity" in done.stderr
    found = json.loads(done.stdout)
    assert found["share"] == 0.125
    assert found["trials"][-1] == {"share": 0.0625, "accuracies": [0.0], "seconds": [5.0], "enough": False}


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["nothing.py"], "nothing.py"),
        (["train.py", "--real", "--cluster", "a.toml"], "a.toml"),
        (["train.py", "--runs-each", "0"], "runs >= 1"),
        (["train.py", "--weighting", "heavy"], "heavy"),
    ],
)
def test_what_cannot_be_asked_is_refused(lab: Lab, args: list[str], named: str) -> None:
    done = ask(*args)
    assert done.exit_code == 2
    assert named in done.stderr
    assert not lab.runs
