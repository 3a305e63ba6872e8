"""A teacher written by hand under `--apply increments`: it follows its student, or the run says no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.runs import Lab

SCRIPT = Path(__file__).parent / "teacher.py"
INCREMENTS: dict[str, Any] = {"workers": 2, "protocol": "asp", "apply": "increments"}


def test_one_inside_the_model_is_refused_since_no_increment_carries_it(lab: Lab) -> None:
    run = lab.run(SCRIPT, **INCREMENTS)
    assert run.result.status == "failed"
    assert "wrote to 'k." in run.end.detail
    assert "is not trained, so no increment carries it" in run.end.detail


def test_one_beside_the_model_stays_the_worker_s_own_and_moves(lab: Lab) -> None:
    run = lab.trained(SCRIPT, "--beside", **INCREMENTS)
    assert float(run.log().split("moved")[1].split()[0]) > 0.01
