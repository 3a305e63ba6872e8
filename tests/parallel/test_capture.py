"""Taking the model out of a script leaves the process as it was, so that several can be measured."""

from __future__ import annotations

from pathlib import Path

from paceline.parallel.plans.capture import capture
from paceline.runtime import seat
from paceline.runtime.join import joined

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"


def test_a_script_can_be_measured_again_in_the_same_process() -> None:
    before = joined()
    first, again = capture(SCRIPT), capture(SCRIPT)
    assert first.batch == again.batch == 16
    assert [p.shape for p in first.model.parameters()] == [p.shape for p in again.model.parameters()]
    assert joined() is before
    assert seat.mine() is None
