"""Steps and batches that are not one to one: what counts in a mean is what is in the gradients."""

from __future__ import annotations

from typing import Any

import pytest

from support.runs import Lab
from support.tensors import assert_close

LOCKSTEP: list[dict[str, Any]] = [
    {"protocol": "bsp"},
    {"protocol": "allreduce"},
    {"protocol": "allreduce", "fabric": "gloo"},
]
SEVERAL_STEPS = """
import sys, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.join()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
x = torch.randn(84, 3)  # the last round has 4 samples for one of two workers, and nothing for the other
loader = DataLoader(TensorDataset(x), batch_size=16 // pace.size)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(2):
    for (x,) in loader:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""


@pytest.mark.parametrize("dials", LOCKSTEP)
def test_several_steps_on_a_batch_equal_one_process_with_the_whole_batch(
    lab: Lab, dials: dict[str, Any]
) -> None:
    script = lab.script(SEVERAL_STEPS)
    alone = lab.trained(script, workers=1)
    run = lab.trained(script, workers=2, **dials)
    assert_close(run.weights, alone.weights, 1e-12)
    assert run.result.samples == alone.result.samples == 2 * 84


LOOP = """
import sys, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.join()
torch.set_default_dtype(torch.float64)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.ones(32, 1)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
every, case = int(sys.argv[1]), sys.argv[2]
for number, (x,) in enumerate(loader, 1):  # the gradient is 0 on rank 0, and -1 on rank 1
    if case == "model.zero_grad" and every == 1:
        model.zero_grad()
    skipped = pace.rank == 1 and number == 2
    if not skipped or case in ("none", "zero_grad"):
        (-pace.rank * model(x)).mean().backward()
    if skipped and case == "zero_grad":
        optimizer.zero_grad()
        continue
    if case == "clip" and not skipped:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    if skipped and every == 1 and case != "none":
        continue
    if number % every == 0:
        optimizer.step()
        if case != "model.zero_grad":
            optimizer.zero_grad()
"""


@pytest.mark.parametrize("dials", LOCKSTEP)
@pytest.mark.parametrize("case", ["skip", "zero_grad", "model.zero_grad", "clip"])
def test_a_batch_that_is_in_no_gradient_does_not_count_in_the_next_mean(
    lab: Lab, dials: dict[str, Any], case: str
) -> None:
    """Both have equal shares in three rounds; in the last rank 0 is alone."""
    run = lab.trained(lab.script(LOOP), 1, case, workers=2, **dials)
    assert run.weights["weight"].item() == pytest.approx(1.5)


@pytest.mark.parametrize("dials", LOCKSTEP)
@pytest.mark.parametrize(("case", "moved"), [("none", 2.0), ("skip", 1 / 3 + 1.0)])
def test_accumulated_gradients_count_by_the_batches_that_are_in_them(
    lab: Lab, dials: dict[str, Any], case: str, moved: float
) -> None:
    """Two batches a step: twice the gradient at half the share, or once at a third."""
    run = lab.trained(lab.script(LOOP), 2, case, workers=2, **dials)
    assert run.weights["weight"].item() == pytest.approx(moved)
