"""A gradient that is not finite is skipped by itself, and not with those that were kept back before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.runs import Lab

SCRIPT = Path(__file__).parent / "withheld_nan.py"
BAD = 7


@pytest.mark.parametrize("protocol", ["asp", "dssp"])
def test_what_was_withheld_before_a_nan_is_pushed(lab: Lab, protocol: str) -> None:
    """With plain SGD and a rate of 1, every good sample has moved its weight by 1."""
    dials = {"trigger": 1e9, "trigger_most": 100, "bad_gradient": "skip", "weighting": "sum"}
    run = lab.trained(SCRIPT, workers=2, protocol=protocol, **dials)
    expected = -torch.ones(12, dtype=torch.float64)
    expected[BAD] = 0.0
    assert torch.equal(run.weights["w"], expected)
