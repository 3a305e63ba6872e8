"""ReduceLROnPlateau with a figure of `pace.evaluate()`: on all workers, or a sentence says that it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.trace.events import Note
from support.runs import Lab, Run

SCRIPT = Path(__file__).parent / "plateau.py"
APART: list[dict[str, Any]] = [
    {"protocol": "asp"},
    {"protocol": "asp", "apply": "increments"},
    {"protocol": "local_sgd"},
]
EQUAL: list[dict[str, Any]] = [
    {"protocol": "allreduce", "private_weights": True},
    {"protocol": "allreduce", "fabric": "gloo"},
]
SAYS = "rank 0 lowers its learning rate from 0.1 to 0.01 by a figure of pace.evaluate() that only it has"


def notes(run: Run) -> list[str]:
    return [event.text for event in run.of(Note) if "lowers its learning rate" in event.text]


@pytest.mark.parametrize("dials", APART)
def test_a_figure_that_only_rank_0_has_is_noticed_where_every_worker_has_a_rate(
    lab: Lab, dials: dict[str, Any]
) -> None:
    run = lab.trained(SCRIPT, workers=2, **dials)
    assert SAYS in notes(run)[0]


@pytest.mark.parametrize("dials", EQUAL)
def test_it_ends_the_run_where_replicas_are_to_stay_equal(lab: Lab, dials: dict[str, Any]) -> None:
    run = lab.run(SCRIPT, workers=2, **dials)
    assert run.result.status == "failed"
    assert "rank 0 steps with a learning rate of 0.01, rank 1 with 0.1 in the same round" in run.end.detail


@pytest.mark.parametrize("dials", [*APART, *EQUAL])
def test_a_figure_that_is_shared_lowers_all_rates(lab: Lab, dials: dict[str, Any]) -> None:
    run = lab.trained(SCRIPT, "--shared", workers=2, **dials)
    first, second = run.log().split("rates ")[1].split()[:2]
    assert float(first) == float(second) < 0.1
    assert not notes(run)


@pytest.mark.parametrize("dials", [{"protocol": "bsp"}, {"protocol": "allreduce"}])
def test_nothing_is_said_where_all_follow_rank_0(lab: Lab, dials: dict[str, Any]) -> None:
    assert not notes(lab.trained(SCRIPT, workers=2, **dials))
