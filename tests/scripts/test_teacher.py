"""A teacher written by hand in a run with a store: it follows its student, or the run says no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.runs import Lab

SCRIPT = Path(__file__).parent / "teacher.py"
STORES: list[dict[str, Any]] = [
    {"protocol": "bsp"},
    {"protocol": "asp"},
    {"protocol": "asp", "apply": "increments"},
]
INCREMENTS: dict[str, Any] = {"workers": 2, "protocol": "asp", "apply": "increments"}


@pytest.mark.some(3)
@pytest.mark.parametrize("store", STORES, ids=str)
def test_one_inside_the_model_is_refused_since_no_step_carries_it(lab: Lab, store: dict[str, Any]) -> None:
    run = lab.run(SCRIPT, workers=2, **store)
    assert run.result.status == "failed"
    assert "wrote to 'k." in run.end.detail
    assert "is not trained, so no step would keep the change" in run.end.detail


def test_one_beside_the_model_stays_the_worker_s_own_and_moves(lab: Lab) -> None:
    run = lab.trained(SCRIPT, "--beside", **INCREMENTS)
    assert float(run.log().split("moved")[1].split()[0]) > 0.01
