"""`--balance` on the command line: what it runs, what it says, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.config import RunConfig
from paceline.trace import read_trace
from paceline.trace.events import Decided, Note
from support.runs import SCRIPTS
from support.shell import Shell

SCRIPT = SCRIPTS / "train.py"
ARGS = ("--", "momentum", "--samples", 400, "--batch", 10, "--epochs", 2)
UNEQUAL = ("-n", 4, "--slow", "3:2.5")


def pushes(out: str) -> list[Any]:
    """The pushes of the run whose folder was printed."""
    events = read_trace(Path(out.strip()))
    return [event for event in events if isinstance(event, Decided) and event.pushed is not None]


@pytest.mark.long
def test_a_balanced_run_says_so_and_its_replay_arrives_at_the_same_bits(shell: Shell) -> None:
    done = shell("train", SCRIPT, "-p", "asp", "--balance", *UNEQUAL, "--device-time", 0.008, *ARGS)
    assert done.code == 0, done.err
    assert "asp + balance" in done.err
    folder = done.out.strip()
    config = msgspec.json.decode(Path(folder, "config.json").read_bytes(), type=RunConfig)
    assert config.balance
    again = shell("replay", folder, "--json")
    assert again.code == 0, again.err
    assert again.json["identical"] is True


def test_compare_adds_one_row_of_balanced_lockstep(shell: Shell) -> None:
    flags = ("--protocols", "bsp,asp", "--balance", *UNEQUAL, "--device-time", 0.008)
    done = shell("compare", SCRIPT, *flags, "--json", *ARGS)
    assert done.code == 0, done.err
    assert [(r["protocol"], r["balance"]) for r in done.json] == [
        ("bsp", False),
        ("asp", False),
        ("bsp", True),
    ]
    page = (shell.runs / "report.html").read_text()
    assert "bsp + balance" in page
    assert "balanced: batches of" in page, "the report does not tell of the sizes"


def test_any_protocol_of_a_comparison_can_be_balanced_by_name(shell: Shell) -> None:
    names = "bsp+balance,ssp:staleness=1+balance"
    done = shell("compare", SCRIPT, "--protocols", names, "--balance", "-n", 2, "--json", *ARGS)
    assert done.code == 0, done.err
    assert [(r["protocol"], r["settings"], r["balance"]) for r in done.json] == [
        ("bsp", {}, True),
        ("ssp", {"staleness": 1}, True),
    ], "what is named already is not run twice"


def test_in_an_exact_simulation_balanced_lockstep_takes_less_virtual_time(shell: Shell) -> None:
    """Virtual time is exact: at equal shares a round takes 40 x 2.5 / (3 x 2.5 + 1) / 10 of a device time."""
    done = shell("simulate", SCRIPT, "-p", "bsp,bsp+balance", *UNEQUAL, "--compute-time", 1, "--json", *ARGS)
    assert done.code == 0, done.err
    plain, balanced = done.json
    assert (plain["balance"], balanced["balance"]) == (False, True)
    assert plain["seconds"] == pytest.approx(20 * 2.5)
    assert balanced["seconds"] < 0.75 * plain["seconds"]
    assert plain["samples"] == balanced["samples"] == 800
    again = shell(
        "simulate", SCRIPT, "-p", "bsp", "--balance", *UNEQUAL, "--compute-time", 1, "--json", *ARGS
    )
    assert again.json["seconds"] == balanced["seconds"]


def test_the_timing_of_a_simulation_is_that_of_the_exact_one(shell: Shell) -> None:
    """The same sizes at the same times, epoch ends aside: one long epoch here."""
    exact = shell("simulate", SCRIPT, "-p", "bsp+balance", *UNEQUAL, *ARGS[:-1], 1)
    timing = shell("simulate", "-p", "bsp+balance", *UNEQUAL, "--batch", 10, "--iterations", 10)
    assert (exact.code, timing.code) == (0, 0), exact.err + timing.err
    first, second = (
        sorted((round(e.t, 9), e.pushed, e.samples) for e in pushes(done.out)) for done in (exact, timing)
    )
    assert first == second
    notes = [e.text for e in read_trace(Path(timing.out.strip())) if isinstance(e, Note)]
    assert notes == [
        "balanced: batches of 12 (rank 0), 12 (rank 1), 12 (rank 2), 4 (rank 3) samples from now on"
    ]


@pytest.mark.parametrize(
    "command", [("train", SCRIPT), ("simulate", SCRIPT), ("simulate", "-p", "bsp", "--batch", 8)], ids=str
)
def test_equal_shards_are_refused(shell: Shell, command: tuple[Any, ...]) -> None:
    done = shell(*command, "--balance", "--shards", "equal")
    assert done.code == 2
    assert "equal gives every worker the same" in done.error
    assert "leave --balance out" in done.error


def test_a_timing_only_simulation_needs_batches_that_can_be_split(shell: Shell) -> None:
    done = shell("simulate", "--protocol", "bsp", "--balance")
    assert done.code == 2
    assert "batch must be > 1, got 1. Use --batch 32" in done.error
    assert not shell.runs.exists(), "nothing was simulated, and yet there is a run"


def test_help_states_the_rule_about_the_loss(shell: Shell) -> None:
    told = " ".join(shell("train", "--help-all").out.replace("│", " ").split())
    assert "The loss must average over its batch" in told
