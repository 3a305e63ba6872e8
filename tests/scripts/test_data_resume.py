"""A run that was stopped goes on where it was: schedulers and random numbers included."""

from __future__ import annotations

from typing import Any

import pytest

from support.runs import Lab, Run
from support.tensors import assert_equal

SCRIPT = """
import random, sys, torch, paceline
from itertools import islice
from torch import nn
from torch.utils.data import DataLoader, Dataset
sys.path.insert(0, {scripts!r})
from pause import Pause
how = sys.argv[1]
pause = Pause(sys.argv[2] if len(sys.argv) > 2 else None, 9)
pace = paceline.join()
torch.manual_seed(1)

class Noisy(Dataset):  # augmented by random numbers of the worker's own
    def __len__(self): return 100
    def __getitem__(self, i):
        x = torch.full((4,), i / 100) + 0.1 * torch.rand(4) + 0.01 * random.random()
        return x, x.sum()[None]

loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
total = 3 * -(-25 // pace.size)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=total + 1)
idle = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
given = (model, optimizer, loader, idle if how == "idle" else scheduler)
model, optimizer, loader, _ = pace.prepare(*given)
for _ in pace.epochs(3):
    for x, y in islice(loader, len(loader)) if how == "exact" else loader:
        pause()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if how != "idle":
            scheduler.step()
        pace.report(lr=optimizer.param_groups[0]["lr"])
"""


def script_of(lab: Lab) -> Any:
    from support.runs import SCRIPTS

    return lab.script(SCRIPT.format(scripts=str(SCRIPTS)))


def stopped(lab: Lab, script: Any, how: str, **dials: Any) -> Run:
    """A run that was stopped at the ninth iteration."""
    go = lab.root / "go on"
    running = lab.start(script, how, go, **dials)
    lab.until_paused(dials["workers"])
    running.stop()
    go.touch()
    run = lab.finish(running)
    assert run.result.status == "stopped", run.logs()
    return run


@pytest.mark.parametrize("how", ["stepped", "idle", "exact"])
@pytest.mark.parametrize(
    "dials",
    [
        {"workers": 1, "protocol": "bsp"},
        {"workers": 3, "protocol": "bsp"},
        {"workers": 2, "protocol": "allreduce"},
        {"workers": 2, "protocol": "local_sgd", "settings": {"period": 4}},
    ],
    ids=lambda dials: f"{dials['protocol']}-{dials['workers']}",
)
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(
    lab: Lab, dials: dict[str, Any], how: str
) -> None:
    """Dropout, augmentation in the worker's own process, a prepared scheduler that is stepped or never is,
    a loop that takes exactly the batches of its epoch."""
    script = script_of(lab)
    first = stopped(lab, script, how, **dials)
    second = lab.trained(script, how, resume=str(first.folder / "checkpoint"), **dials)
    whole = lab.trained(script, how, **dials)
    assert_equal(second.weights, whole.weights)


def test_a_checkpoint_on_the_way_has_random_numbers_too(lab: Lab) -> None:
    """A run in lockstep whose store is killed goes on from the last checkpoint bit for bit."""
    script = script_of(lab)
    dials: dict[str, Any] = {"workers": 2, "protocol": "bsp"}
    go = lab.root / "go on"
    running = lab.start(script, "stepped", go, checkpoint_every="4", **dials)
    lab.until_paused(2)
    folder = running.config.path / "checkpoint"
    kept = lab.root / "kept"
    from shutil import copytree

    from support.runs import wait_until

    wait_until((folder / "state.json").exists, "a checkpoint is written")
    copytree(folder, kept)
    go.touch()
    whole = lab.finish(running)
    second = lab.trained(script, "stepped", resume=str(kept), **dials)
    assert_equal(second.weights, whole.weights)
    assert second.result.updates < whole.result.updates or second.pushes
