"""An optimizer that a script steps and did not prepare: what it trains drifts apart, and the run says so."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.trace.events import Note
from support.runs import Lab, Run

SCRIPT = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Around(torch.optim.SGD):
    def __init__(self, base):
        super().__init__(base.param_groups, lr=0.1)
        self.base = base
    def step(self, closure=None):
        self.base.step()

pace = paceline.join()
torch.manual_seed(0)
model, probe = nn.Linear(3, 1), nn.Linear(3, 1)
log_alpha = torch.zeros((), requires_grad=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
alpha_optimizer = torch.optim.Adam([log_alpha], lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=4)
{before}
_, prepared, *_, loader = pace.prepare(model, {prepared}, loader)
for _ in pace.epochs(2):
    for (x,) in loader:
        prepared.zero_grad()
        model(x).square().mean().backward()
        {step}.step()
        {loop}
"""
ALPHA = "alpha_optimizer.zero_grad(); (log_alpha * x.mean()).backward(); alpha_optimizer.step()"
PROBE = "pace.evaluate(lambda m: float(torch.optim.SGD(probe.parameters(), lr=0.1).step() or 0))"


def script(prepared: str = "optimizer", before: str = "", step: str = "optimizer", loop: str = "pass") -> str:
    return SCRIPT.format(prepared=prepared, before=before, step=step, loop=loop)


def said(run: Run) -> list[str]:
    return [note.text for note in run.of(Note) if "was not prepared" in note.text]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "way",
    [
        {"protocol": "bsp"},
        {"protocol": "asp", "apply": "increments"},
        {"protocol": "allreduce"},
        {"protocol": "local_sgd", "fabric": "gloo"},
        {"protocol": "local_sgd", "mesh": {"data": 2}},
    ],
    ids=str,
)
def test_it_is_named_once_with_the_line_that_steps_it(lab: Lab, way: dict[str, Any]) -> None:
    text = script(loop=ALPHA)
    run = lab.trained(lab.script(text), workers=2, **way)
    (note,) = said(run)
    line = next(i for i, each in enumerate(text.splitlines(), 1) if ALPHA in each)
    assert "steps Adam 'alpha_optimizer', which was not prepared (1 numbers" in note
    assert f"line {line})" in note


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "text",
    [
        script(),
        script(prepared="optimizer, alpha_optimizer", loop=ALPHA),
        script(before="pace.local(alpha_optimizer)", loop=ALPHA),
        script(before="pace.local(log_alpha)", loop=ALPHA),
        script(before="around = Around(optimizer)", step="around"),
        script(loop=PROBE),
        script(before=ALPHA.replace("x.mean()", "1.0")),
    ],
    ids=[
        "none",
        "prepared",
        "declared",
        "its tensor declared",
        "around a prepared one",
        "evaluating",
        "before",
    ],
)
def test_nothing_is_said_where_it_is_meant_or_belongs_to_a_prepared_one(lab: Lab, text: str) -> None:
    assert said(lab.trained(lab.script(text), workers=2, protocol="asp")) == []


def test_alone_nobody_is_there_to_drift_apart_from(lab: Lab) -> None:
    assert said(lab.trained(lab.script(script(loop=ALPHA)), workers=1)) == []


def test_all_reduce_still_steps_one_model_for_all(lab: Lab) -> None:
    """The look is torch's hook for all optimizers; a script's own one there needs replicas."""
    text = script(loop="assert pace._trainer.shared")
    assert lab.trained(lab.script(text), workers=2, protocol="allreduce").result.status == "finished"
