"""A step with a closure is clipped and looked at like any other."""

from __future__ import annotations

from typing import Any

import pytest

from support.runs import Lab, Run

SCRIPT = """
import sys, torch, paceline

pace = paceline.join()
torch.set_default_dtype(torch.float64)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = getattr(torch.optim, sys.argv[1])(model.parameters(), lr=1.0)
model, optimizer = pace.prepare(model, optimizer)
factors = [3.0, 5.0, float(sys.argv[2])]
for factor in factors:
    def closure():
        optimizer.zero_grad()
        loss = -factor * model(torch.ones(1, 1)).mean()
        loss.backward()
        return loss
    assert optimizer.step(closure) is not None or factor != factor
"""


def run(lab: Lab, name: str, last: float, **dials: Any) -> Run:
    return lab.run(lab.script(SCRIPT), name, last, **dials)


@pytest.mark.parametrize("dials", [{"workers": 1}, {"workers": 2, "protocol": "bsp"}])
def test_a_step_with_a_closure_is_clipped(lab: Lab, dials: dict[str, Any]) -> None:
    assert run(lab, "SGD", 0.25, clip_norm=0.5, **dials).weights["weight"].item() == pytest.approx(1.25, 1e-4)


def test_a_gradient_of_a_closure_that_is_not_finite_is_not_stepped_with(lab: Lab) -> None:
    skipped = run(lab, "SGD", float("nan"), workers=1, bad_gradient="skip")
    assert skipped.weights["weight"].item() == 8.0
    stopped = run(lab, "SGD", float("nan"), workers=1)
    assert "NaN or infinity in the gradient of 'weight'" in stopped.end.detail


def test_clipping_is_refused_where_a_closure_is_evaluated_several_times(lab: Lab) -> None:
    assert run(lab, "LBFGS", 1.0, workers=1).result.status == "finished"
    refused = run(lab, "LBFGS", 1.0, workers=1, clip_norm=0.5)
    assert refused.result.status == "failed"
    assert "several times" in refused.end.detail
