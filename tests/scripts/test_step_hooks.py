"""Hooks on an optimizer's step run as alone: once per step, before its gradient is used, and after."""

from __future__ import annotations

from typing import Any

import pytest

from support.runs import Lab, Run
from support.tensors import assert_close

SCRIPT = """
import sys, torch, paceline
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

pace = paceline.join()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
called, seen = [], []

def halve(optimizer, args, kwargs):
    called.append("pre")
    seen.append(model.weight.detach().clone())
    for p in model.parameters():
        p.grad.mul_(0.5)

def look(optimizer, args, kwargs):
    called.append("post")
    assert not torch.equal(seen[-1], model.weight)  # the step has been taken

def register():
    if sys.argv[1] == "own":
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(look)
    else:
        removed.append(register_optimizer_step_pre_hook(halve))
        removed.append(register_optimizer_step_post_hook(look))

removed = []
if sys.argv[2] == "before":
    register()
model, optimizer = pace.prepare(model, optimizer)
if sys.argv[2] == "after":
    register()
x = torch.arange(12.0).view(4, 3) / 10
mine = x if pace.size == 1 else x[pace.rank::2]
for step in range(3):
    optimizer.zero_grad()
    model(mine).square().mean().backward()
    pace.report(samples=len(mine))
    optimizer.step()
for each in removed:  # this process has other runs to come
    each.remove()
assert called == ["pre", "post"] * 3, called
"""
WAYS: list[dict[str, Any]] = [
    {"protocol": "bsp"},
    {"protocol": "asp"},
    {"protocol": "allreduce"},
    {"protocol": "local_sgd"},
    {"protocol": "asp", "apply": "increments"},
]


def trained(lab: Lab, *how: str, **dials: Any) -> Run:
    return lab.trained(lab.script(SCRIPT), *how, **dials)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("whose", ["own", "all"])
@pytest.mark.parametrize("dials", WAYS)
def test_they_are_called_once_per_step(lab: Lab, whose: str, when: str, dials: dict[str, Any]) -> None:
    trained(lab, whose, when, workers=2, **dials)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("protocol", ["bsp", "allreduce"])
def test_what_they_make_of_gradients_is_stepped_with(lab: Lab, protocol: str, when: str) -> None:
    alone = trained(lab, "own", when, workers=1)
    assert_close(trained(lab, "own", when, workers=2, protocol=protocol).weights, alone.weights, 1e-12)
