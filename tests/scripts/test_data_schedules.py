"""Schedules of a known length, lengths of loaders, and what all workers tell each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from paceline.runtime.worker.optimizer.schedules import follow, misfit
from paceline.trace.events import Note, Reported
from support.runs import Lab, Run

ONE_CYCLE = """
import sys, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
late = sys.argv[1] == "after"
pace = paceline.join()
torch.manual_seed(1)
x = torch.randn(490, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def schedule():
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, steps_per_epoch=len(loader), epochs=2)

scheduler = None if late else schedule()
if late:
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    scheduler = pace.prepare(schedule())
else:
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
for _ in pace.epochs(2):
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        scheduler.step()
        pace.report(loss=loss, lr=optimizer.param_groups[0]["lr"], steps=scheduler.last_epoch)
"""


def warnings(run: Run) -> list[str]:
    return [event.text for event in run.of(Note) if event.level == "warning"]


@pytest.mark.parametrize("protocol", ["bsp", "asp", "dssp", "allreduce"])
def test_a_schedule_of_the_prepared_length_ends_with_the_run(lab: Lab, protocol: str) -> None:
    """490 samples in eights: 62 batches, for three workers 21 steps per epoch."""
    run = lab.trained(lab.script(ONE_CYCLE), "after", workers=3, protocol=protocol)
    assert not any("OneCycleLR" in text for text in warnings(run))
    told = run.of(Reported)
    assert max(event.values["steps"] for event in told) == 2 * 21
    assert min(event.values["lr"] for event in told) < 1e-4
    losses = [event.values["loss"] for event in told]
    assert sum(losses[-10:]) < sum(losses[:10]) / 2


def test_a_schedule_of_the_length_before_is_told_what_to_write_instead(lab: Lab) -> None:
    run = lab.trained(lab.script(ONE_CYCLE), "before", workers=3, protocol="bsp")
    (text,) = [text for text in warnings(run) if "OneCycleLR" in text]
    assert "total_steps=124" in text
    assert "2 epochs would end at step 42 of 124" in text
    assert "total_steps=2 * len(loader), which is 42" in text


def test_a_schedule_that_is_a_few_steps_too_short_stays_at_its_last_rate_and_says_so() -> None:
    """As with gradients accumulated over two batches on three workers: 17 updates, reckoned with were 16."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler, told = OneCycleLR(optimizer, 0.1, total_steps=16), list[str]()
    follow(scheduler, lambda: 1, told.append)
    rates = []
    for _ in range(18):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[17] == rates[16] == rates[15]
    assert len(told) == 1
    assert "made for 16 steps" in told[0]
    with pytest.raises(ValueError, match="Tried to step 17 times"):
        scheduler.step()  # so many more are no rounding


def test_alone_both_are_the_same_and_nobody_is_told(lab: Lab) -> None:
    both = [lab.trained(lab.script(ONE_CYCLE), when, workers=1) for when in ("before", "after")]
    assert not warnings(both[0])
    last = [run.of(Reported)[-1].values for run in both]
    assert last[0] == last[1]


def test_only_lengths_that_come_from_the_loader_before_are_spoken_of() -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)

    def told(make: Any) -> bool:
        return misfit(make(optimizer()), 62, 21, 3) is not None

    assert told(lambda o: OneCycleLR(o, 0.1, total_steps=186))
    assert told(lambda o: CosineAnnealingLR(o, 124))
    assert told(lambda o: SequentialLR(o, [LinearLR(o, total_iters=5), CosineAnnealingLR(o, 62)], [5]))
    assert told(lambda o: SequentialLR(o, [ExponentialLR(o, 0.9), ExponentialLR(o, 0.8)], [62]))
    assert told(lambda o: StepLR(o, 124))
    assert told(lambda o: MultiStepLR(o, [20, 186]))
    assert told(lambda o: CosineAnnealingWarmRestarts(o, 62))
    assert told(lambda o: CyclicLR(o, 0.1, 0.2, step_size_up=248))
    assert not told(lambda o: StepLR(o, 30))
    assert not told(lambda o: MultiStepLR(o, [20, 100]))
    assert not told(lambda o: OneCycleLR(o, 0.1, total_steps=63))
    assert not told(lambda o: CosineAnnealingLR(o, 10))
    assert not told(lambda o: LambdaLR(o, lambda step: 1.0))
    assert misfit(OneCycleLR(optimizer(), 0.1, total_steps=186), 62, 62, 1) is None


def test_a_milestone_that_would_come_alone_but_not_here_is_spoken_of() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    text = misfit(MultiStepLR(optimizer, [20, 100]), 62, 21, 3, planned=2)
    assert text is not None
    assert "MultiStepLR was built with milestone=100, which never comes" in text
    assert "takes 42 steps in 2 epochs, and not 124 as alone" in text
    assert misfit(MultiStepLR(optimizer, [20, 40]), 62, 21, 3, planned=2) is None
    assert misfit(MultiStepLR(optimizer, [20, 500]), 62, 21, 3, planned=2) is None


PER_EPOCH = ONE_CYCLE.replace(
    "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, steps_per_epoch=len(loader), epochs=2)",
    "torch.optim.lr_scheduler.StepLR(optimizer, 62)",
)


def test_a_schedule_that_counts_epochs_is_not_spoken_of(lab: Lab) -> None:
    """Only how the script steps it tells that 62 are not steps."""
    dials: dict[str, Any] = {"workers": 3, "protocol": "bsp"}
    assert any("StepLR" in text for text in warnings(lab.trained(lab.script(PER_EPOCH), "before", **dials)))
    epochs = PER_EPOCH.replace("        scheduler.step()\n", "") + "    scheduler.step()\n"
    assert not any("StepLR" in text for text in warnings(lab.trained(lab.script(epochs), "before", **dials)))


ACCUMULATES = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
pace = paceline.join()
torch.manual_seed(1)
x = torch.randn(102, 4, dtype=torch.float64)  # 26 batches: not all workers can have a multiple of three
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
model = nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(3):
    for i, (a, b) in enumerate(loader):
        (nn.functional.mse_loss(model(a), b) / 3).backward()
        if (i + 1) % 3 == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
"""


def test_the_end_of_a_pass_is_found_in_lockstep_and_missed_aloud_elsewhere(lab: Lab) -> None:
    script = lab.script(ACCUMULATES)
    run = lab.trained(script, workers=3, protocol="bsp")
    assert not any("ended a pass" in text for text in warnings(run))
    slow: dict[str, Any] = {"slow": {2: 4.0}, "device_time_s": 0.002}
    run = lab.trained(script, workers=3, protocol="asp", **slow)
    assert any("ended a pass" in text and "Step after the loop" in text for text in warnings(run))


GATHERS = """
import sys, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
pace = paceline.join()
x = torch.randn(int(sys.argv[1]), 4)
loader = DataLoader(TensorDataset(x), batch_size=4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(2):
    for (a,) in loader:
        optimizer.zero_grad()
        model(a).square().mean().backward()
        optimizer.step()
    mine = torch.full((pace.rank + 1, 2), pace.rank, dtype=torch.int32)
    all_rows = pace.gather(mine)
    want = torch.cat([torch.full((r + 1, 2), r, dtype=torch.int32) for r in range(pace.size)])
    assert torch.equal(all_rows, want), all_rows
    assert pace.gather(float(pace.rank)).tolist() == list(range(pace.size))
big = torch.full((700_000,), float(pace.rank), dtype=torch.float64)
assert pace.gather(big).sum() == 700_000 * sum(range(pace.size))
assert pace.gather(torch.ones(0, 3, dtype=torch.bfloat16)).shape == (0, 3)
if sys.argv[2:] == ["unlike"]:
    pace.gather(torch.ones(2, pace.rank + 1))
"""


@pytest.mark.parametrize(
    ("workers", "protocol"),
    [(1, "bsp"), (3, "bsp"), (3, "ssp"), (2, "asp"), (3, "allreduce"), (2, "local_sgd")],
)
def test_gather_gives_all_rows_in_the_order_of_ranks(lab: Lab, workers: int, protocol: str) -> None:
    slow: dict[str, Any] = {"slow": {workers - 1: 3.0}} if protocol == "ssp" else {}
    lab.trained(lab.script(GATHERS), 48, workers=workers, protocol=protocol, **slow)


def test_gather_refuses_what_does_not_fit_and_where_it_cannot(lab: Lab) -> None:
    script = lab.script(GATHERS)
    run = lab.run(script, 48, "unlike", workers=2, protocol="bsp")
    assert "Only the first dimension may differ" in run.end.detail
    run = lab.run(script, 48, workers=2, protocol="bsp", cluster={"workers": 2, "compute": 0.1})
    assert run.end.user_mistake
    assert "pace.gather() in a simulation" in run.end.detail
    run = lab.run(script, 20, workers=3, protocol="local_sgd", settings={"period": 1})
    assert "equally many iterations" in run.end.detail
