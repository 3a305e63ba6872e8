"""A sampler of ten billion positions: any kind of run begins at once, and goes on where it was stopped."""

from __future__ import annotations

from typing import Any

import pytest

from support.runs import SCRIPTS, Lab
from support.tensors import assert_equal

SCRIPT = """
import sys, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
sys.path.insert(0, {scripts!r})
from pause import Pause
pause = Pause(sys.argv[1] if len(sys.argv) > 1 else None, 9)
pace = paceline.join()
torch.manual_seed(1)
data = TensorDataset(torch.rand(1000, 4), torch.rand(1000, 1))
drawn = RandomSampler(data, True, 10**10)
loader = DataLoader(data, batch_size=4, sampler=drawn)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
for x, y in loader:
    pause()
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    scheduler.step()
    if scheduler.last_epoch >= 15:
        pace.stop()
"""


@pytest.mark.parametrize(
    "dials",
    [
        {"workers": 2, "protocol": "bsp"},
        {"workers": 2, "protocol": "allreduce"},
        {"workers": 2, "protocol": "local_sgd", "settings": {"period": 3}},
    ],
    ids=lambda dials: str(dials["protocol"]),
)
def test_an_endless_epoch_goes_on_after_a_resume_bit_for_bit(lab: Lab, dials: dict[str, Any]) -> None:
    script, go = lab.script(SCRIPT.format(scripts=str(SCRIPTS))), lab.root / "go on"
    running = lab.start(script, go, **dials)
    lab.until_paused(dials["workers"])
    running.stop()
    go.touch()
    first = lab.finish(running)
    assert first.result.status == "stopped", first.logs()
    kept = first.folder / "checkpoint"
    assert sum(path.stat().st_size for path in kept.rglob("state.json")) < 500_000
    second = lab.trained(script, resume=str(kept), **dials)
    whole = lab.trained(script, **dials)
    assert first.result.samples < whole.result.samples == 2 * 15 * 4
    assert_equal(second.weights, whole.weights)


def test_without_rounds_an_endless_epoch_begins_and_ends_too(lab: Lab) -> None:
    run = lab.trained(lab.script(SCRIPT.format(scripts=str(SCRIPTS))), workers=2, protocol="ssp")
    assert run.result.status == "finished"
    assert run.result.samples >= 15 * 4
