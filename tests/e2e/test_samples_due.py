"""Every run says how many of the samples that its script asked for it trained on, and warns if not all."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.trace.events import Note
from support.runs import Lab, Run

DUE = 4 * 48


def shortfalls(run: Run) -> list[str]:
    return [each.text for each in run.of(Note) if "the run trained on" in each.text]


def figures(run: Run) -> tuple[int | None, int | None]:
    return run.result.samples, run.result.samples_due


@pytest.mark.parametrize(("protocol", "settings"), [("asp", {}), ("ssp", {"staleness": 3})])
def test_a_counted_loop_that_leaves_samples_undone_says_so_and_what_helps(
    lab: Lab, protocol: str, settings: dict[str, Any]
) -> None:
    """len(loader) is an average there: a fast worker's pass is over before a slow one's."""
    slow: dict[str, Any] = {"workers": 2, "slow": {1: 4.0}, "device_time_s": 0.002}
    run = lab.trained("passes.py", "--loop", "counted", protocol=protocol, settings=settings, **slow)
    done, due = figures(run)
    assert due == DUE
    assert done is not None
    assert done < DUE
    (text,) = shortfalls(run)
    assert f"the run trained on {done} of {DUE} samples: the script broke off" in text
    assert "--shards equal" in text
    helped = lab.trained("passes.py", "--loop", "counted", protocol=protocol, shards="equal", **slow)
    assert (figures(helped), shortfalls(helped)) == ((DUE, DUE), [])


@pytest.mark.parametrize(
    "dials",
    [
        {"protocol": "asp", "workers": 2},
        {"protocol": "bsp", "workers": 2},
        {"protocol": "bsp", "workers": 2, "fabric": "shared", "balance": True},
        {"protocol": "local_sgd", "workers": 2},
        {"protocol": "asp", "workers": 2, "apply": "increments"},
        {"protocol": "allreduce", "workers": 2, "fabric": "gloo"},
        {"protocol": "asp", "workers": 1},
        {"workers": 2, "mesh": {"data": 2}},
    ],
)
def test_a_run_of_whole_passes_trains_on_all_samples_that_are_due(lab: Lab, dials: dict[str, Any]) -> None:
    run = lab.trained("passes.py", **dials)
    assert (figures(run), shortfalls(run)) == ((DUE, DUE), [])


@pytest.mark.parametrize(
    "dials", [{"protocol": "bsp", "workers": 2}, {"workers": 1}, {"workers": 2, "mesh": {"data": 2}}]
)
def test_passes_that_a_script_breaks_off_are_named_as_the_cause_in_every_family(
    lab: Lab, dials: dict[str, Any]
) -> None:
    run = lab.trained("passes.py", "--loop", "broken off", **dials)
    done, due = figures(run)
    assert due == DUE
    (text,) = shortfalls(run)
    assert f"trained on {done} of {DUE} samples: the script broke off" in text
    assert "after 3 batches" in text
    assert "--shards" not in text


@pytest.mark.parametrize("dials", [{"protocol": "bsp", "workers": 2}, {"workers": 1}])
def test_batches_that_no_step_used_are_named_as_the_cause(lab: Lab, dials: dict[str, Any]) -> None:
    run = lab.trained("passes.py", "--loop", "unused", "--epochs", 1, **dials)
    (text,) = shortfalls(run)
    assert "on 40 of 48 samples: no optimizer step used" in text


def test_short_batches_that_are_dropped_are_not_due(lab: Lab) -> None:
    run = lab.trained("passes.py", "--loader", "drop_last", "--samples", 50, protocol="asp", workers=2)
    assert (figures(run), shortfalls(run)) == ((DUE, DUE), [])


def test_batches_of_a_sampler_of_the_script_s_own_are_counted_as_batches(lab: Lab) -> None:
    run = lab.trained("passes.py", "--loader", "whole", "--loop", "broken off", protocol="bsp", workers=2)
    assert figures(run)[1] is None, "its batches may be of any size"
    (text,) = shortfalls(run)
    assert "of 48 batches" in text


@pytest.mark.parametrize("dials", [{"protocol": "asp", "workers": 2}, {"workers": 1}])
def test_a_script_that_stops_the_run_is_not_warned_and_has_the_numbers(
    lab: Lab, dials: dict[str, Any]
) -> None:
    run = lab.trained("passes.py", "--loop", "broken off", "--own-stop", **dials)
    assert run.result.samples_due is not None
    assert run.result.samples_due > (run.result.samples or 0)
    assert shortfalls(run) == []


@pytest.mark.parametrize("dials", [{"protocol": "bsp", "workers": 2}, {"workers": 1}])
def test_of_a_resumed_run_is_due_what_the_first_had_left(lab: Lab, dials: dict[str, Any]) -> None:
    running = lab.start("train.py", "momentum", "--samples", 64, "--epochs", 4, *lab.pause(9), **dials)
    lab.until_paused(dials["workers"])
    running.stop()
    lab.go_on()
    first = lab.finish(running)
    assert first.result.status == "stopped"
    again = lab.trained(
        "train.py",
        "momentum",
        "--samples",
        64,
        "--epochs",
        4,
        resume=str(first.folder / "checkpoint"),
        **dials,
    )
    assert again.result.samples == again.result.samples_due == 4 * 64 - (first.result.samples or 0)
    assert shortfalls(again) == []
