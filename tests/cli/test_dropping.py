"""`--drop-staler` in real runs, their replay, and exact simulations."""

from __future__ import annotations

from paceline.trace import read_trace
from paceline.trace.events import Decided, Note
from support.runs import SCRIPTS
from support.shell import Shell

SCRIPT = SCRIPTS / "train.py"
ARGS = ("--", "momentum", "--samples", 128, "--epochs", 1)
UNEQUAL = ("-n", 3, "--slow", "2:4")


def test_a_real_run_drops_stale_gradients_and_is_replayed_to_the_same_bits(shell: Shell) -> None:
    asked = ("-p", "asp", *UNEQUAL, "--device-time", 0.004, "--drop-staler", 1)
    ran = shell("train", SCRIPT, *asked, "--json", *ARGS)
    assert ran.code == 0, ran.err
    folder = shell.runs / ran.json["run"]
    pushes = [e for e in read_trace(folder) if isinstance(e, Decided) and e.pushed is not None]
    assert {e.fate for e in pushes if e.staleness > 1} == {"drop"}
    assert {e.fate for e in pushes if e.staleness <= 1} == {"apply"}
    assert all(e.release == (e.pushed,) for e in pushes)
    assert ran.json["dropped"] == len(pushes) - ran.json["updates"] > 0
    assert ran.json["samples"] == 128
    again = shell("replay", folder, "--json")
    assert again.code == 0, again.err
    assert again.json["identical"] is True


def test_an_exact_simulation_decides_as_the_simulation_of_times_does(shell: Shell) -> None:
    asked = ("-p", "asp", *UNEQUAL, "--jitter", 0.2, "--seed", 3, "--drop-staler", 2, "--json")
    exact = shell("simulate", SCRIPT, *asked, "--correct", "none", *ARGS)
    assert exact.code == 0, exact.err
    timing = shell("simulate", *asked, "--iterations", exact.json["iterations"] // 3)
    assert timing.code == 0, timing.err
    fates = [
        [
            (e.pushed, e.fate, e.staleness)
            for e in read_trace(shell.runs / run["run"])
            if isinstance(e, Decided)
        ]
        for run in (exact.json, timing.json)
    ]
    both = min(map(len, fates)) - 6  # the last ones depend on who finds work
    assert fates[0][:both] == fates[1][:both]
    assert exact.json["dropped"] > 0


def test_lockstep_says_that_it_changes_nothing_and_a_mistake_is_refused(shell: Shell) -> None:
    ran = shell("simulate", "-p", "bsp", "-n", 2, "--drop-staler", 2, "--iterations", 3, "--json")
    notes = [e.text for e in read_trace(shell.runs / ran.json["run"]) if isinstance(e, Note)]
    assert any("changes nothing: under 'bsp'" in text for text in notes)
    refused = shell("train", SCRIPT, "-n", 2, "--drop-staler", -1)
    assert refused.code == 2
    assert "--drop-staler takes a number of updates, 0 or more, got -1" in refused.err
