"""`--trigger` on the command line: real runs and their replay, comparisons, exact simulations, refusals."""

from __future__ import annotations

import pytest

from support.runs import SCRIPTS
from support.shell import Shell

SCRIPT = SCRIPTS / "train.py"
ARGS = ("--", "momentum", "--samples", 128, "--epochs", 1)
UNEQUAL = ("-n", 3, "--slow", "2:4")


def test_a_real_run_is_replayed_to_the_same_bits(shell: Shell) -> None:
    asked = ("-p", "asp", *UNEQUAL, "--device-time", 0.004, "--trigger", 1.1, "--trigger-most", 5)
    ran = shell("train", SCRIPT, *asked, "--json", *ARGS)
    assert ran.code == 0, ran.err
    assert ran.json["samples"] == 128
    assert ran.json["trigger"]["steps"] == 32 > ran.json["iterations"]
    assert ran.json["trigger"]["pushed"] == ran.json["iterations"] / 32
    again = shell("replay", shell.runs / ran.json["run"], "--json")
    assert again.code == 0, again.err
    assert again.json["identical"] is True


def test_an_exact_simulation_repeats_and_a_comparison_takes_it(shell: Shell) -> None:
    asked = (*UNEQUAL, "--trigger", 1.1, "--seed", 3, "--json")
    runs = [shell("simulate", SCRIPT, "-p", "asp", *asked, "--jitter", 0.2, *ARGS) for _ in range(2)]
    assert [ran.code for ran in runs] == [0, 0], runs[0].err
    first, second = (ran.json | {"run": ""} for ran in runs)
    assert first == second
    compared = shell("compare", SCRIPT, "--protocols", "asp,ssp", *asked, *ARGS)
    assert compared.code == 0, compared.err
    assert all(each["trigger"]["steps"] == 32 for each in compared.json)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("train", SCRIPT, "-n", 2, "--trigger", 0), "trigger must be > 0, got 0"),
        (("train", SCRIPT, "-n", 2, "--trigger", 1, "--trigger-most", 0), "1 or more, got 0"),
        (("train", SCRIPT, "-n", 1, "--trigger", 1), "a single worker steps without one"),
        (("train", SCRIPT, "-n", 2, "--trigger", 1, "--balance"), "--balance counts each by its samples"),
        (("train", SCRIPT, "-n", 2, "--trigger", 1, "--mesh", "stage=2"), "workers push to no store"),
        (("train", SCRIPT, "-n", 2, "--trigger", 1, "-p", "bsp"), "under 'bsp' all wait for every gradient"),
        (("train", SCRIPT, "-n", 2, "--trigger", 1, "-p", "dpsgd"), "there is no store"),
        (("simulate", "-p", "asp", "--trigger", 1), "a simulation of times has none"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    shell: Shell, asked: tuple[object, ...], why: str
) -> None:
    ran = shell(*map(str, asked), *(ARGS if asked[0] == "train" else ()))
    assert ran.code == 2
    assert why in ran.error


def test_most_without_a_trigger_says_that_it_changes_nothing(shell: Shell) -> None:
    ran = shell("train", SCRIPT, "-n", 2, "-p", "asp", "--trigger-most", 3, *ARGS)
    assert ran.code == 0
    assert "--trigger-most 3 changes nothing without --trigger" in ran.err
