"""D-PSGD in real processes: workers go on as far as their neighbours allow, and no bit tells of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.trace.events import Evaluated
from support.runs import Lab, Run
from support.tensors import assert_equal

pytestmark = pytest.mark.timeout(100)


def seen(run: Run) -> list[dict[str, float]]:
    return [event.values for event in run.of(Evaluated)]


def test_who_is_not_its_neighbour_does_not_wait_for_a_late_worker_and_an_evaluation_does_not_see_it(
    lab: Lab, tmp_path: Path
) -> None:
    """Rank 2 does two iterations before rank 0 has done any, which used to wait for ever. Weights, what was
    evaluated every second iteration and the distances seen then are those of a run where nobody is late.
    The last round is not full: 46 batches for four."""
    dials: dict[str, Any] = {"workers": 4, "protocol": "dpsgd"}
    late, plain = (lab.trained("neighbours.py", *words, **dials) for words in ((tmp_path,), ()))
    assert_equal(late.weights, plain.weights)
    assert seen(late) == seen(plain)
    assert len(seen(plain)) == 6
