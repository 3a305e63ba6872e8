"""In lockstep an epoch is one of a single process with the batches of a round as one, divide or not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.store.work.budget import Budget, Source
from paceline.store.work.dealt import Dealt
from support.runs import Lab, once
from support.tensors import assert_close

EPOCHS, BATCH = 3, 8
SCRIPT = """
import sys, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
samples, drop_last = int(sys.argv[1]), sys.argv[2] == "drop"
pace = paceline.join()
torch.manual_seed(1)
x = torch.randn(samples, 5, dtype=torch.float64)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=8, drop_last=drop_last)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(3):
    for i, (a, b) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
    assert i + 1 == len(loader), (i + 1, len(loader))
"""


def plain(samples: int, batch: int, drop_last: bool) -> tuple[dict[str, Tensor], int]:
    """The same in one process with the large batch; and how many updates it made."""
    torch.manual_seed(1)
    x = torch.randn(samples, 5, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(data, batch_size=batch, drop_last=drop_last)
    for _ in range(EPOCHS):
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
    return model.state_dict(), EPOCHS * len(loader)


@pytest.mark.parametrize(
    ("samples", "how", "dials"),
    [
        (490, "keep", {"protocol": "bsp"}),
        (482, "keep", {"protocol": "allreduce"}),
        (490, "drop", {"protocol": "bsp"}),
        (490, "keep", {"protocol": "allreduce", "fabric": "gloo"}),
        (481, "keep", {"protocol": "bsp", "shards": "equal"}),
    ],
)
def test_lockstep_is_one_process_with_the_whole_batch_also_when_data_do_not_divide(
    lab: Lab, samples: int, how: str, dials: dict[str, Any]
) -> None:
    """490 samples, batches of 8, three workers: 21 updates per epoch, the last one of 10 samples."""
    run = lab.trained(lab.script(SCRIPT), samples, how, workers=3, **dials)
    weights, updates = plain(samples, 3 * BATCH, how == "drop")
    assert_close(run.weights, weights, 1e-11)
    assert len(run.pushes) == 3 * updates
    used = samples // (3 * BATCH) * 3 * BATCH if how == "drop" else samples
    assert run.used() == once(EPOCHS, used)
    assert run.result.samples == EPOCHS * used


def test_a_replay_and_an_exact_simulation_have_the_same_rounds(lab: Lab) -> None:
    script = lab.script(SCRIPT)
    run = lab.trained(script, 482, "keep", workers=3, protocol="bsp")
    again = lab.trained(script, 482, "keep", workers=3, protocol="bsp", replay=str(run.folder))
    cluster = {"workers": 3, "compute": 0.1}
    simulated = lab.trained(script, 482, "keep", workers=3, protocol="bsp", cluster=cluster)
    for other in (again, simulated):
        assert_close(other.weights, run.weights, 0.0)
        assert other.result.updates == run.result.updates == 63


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_round_mixes_epochs_whoever_dies_and_comes_back(data: st.DataObject) -> None:
    """Rounds of draws by rank. Real work of a round is of one epoch, unless somebody died over another."""
    workers = data.draw(st.integers(2, 5))
    batch, units = data.draw(st.integers(1, 4)), data.draw(st.integers(20, 60))
    source = Source(units, batch)
    kind = data.draw(st.sampled_from(["shared", "equal", "dealt"]))
    level = kind == "dealt"
    budget = Dealt(source, workers, level) if level else Budget(source, workers, kind, level=True)  # type: ignore[arg-type]
    used: Counter[tuple[int, int]] = Counter()
    living = list(range(workers))
    death = data.draw(st.integers(0, 30))
    for number in range(60):
        drawn = {rank: budget.draw(rank) for rank in living}
        epochs = {each.epoch for each in drawn.values() if each.count}
        assert len(epochs) <= (1 if number < death else 2)
        if number == death and len(living) > 1:
            budget.give_back(living.pop(data.draw(st.integers(0, len(living) - 1))))
        for rank in living:
            budget.finish(rank, [drawn[rank]])
            used.update((drawn[rank].epoch, p) for p in range(drawn[rank].first, drawn[rank].end))
    last = min(epoch for epoch in range(100) if used[epoch, 0] == 0)
    for epoch in range(last - 1):
        assert all(used[epoch, position] == 1 for position in range(units))


def test_without_lockstep_nobody_computes_in_vain() -> None:
    budget = Budget(Source(10, 4), 2)
    assert all(budget.draw(number % 2).count for number in range(30))
