"""In lockstep all workers read one buffer of weights: who writes to it is refused, or fails with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.shell import Outcome, Shell

Write = Callable[[str], Path]

HEAD = """
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(8, 4), nn.Flatten(), nn.Linear(8, 1))
data = TensorDataset(torch.randint(8, (32, 2)), torch.randn(32, 1))
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""
LOOP = """
first, last = copy.deepcopy(model.state_dict()), copy.deepcopy(model[2].state_dict())
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for step, (x, y) in enumerate(loader):
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ENDS = "pace.leave()\n"
LOADS = "    model.load_state_dict(first)\n"


def train(shell: Shell, script: Path, protocol: str, *flags: object) -> Outcome:
    return shell("train", script, "--protocol", protocol, "--workers", 2, *flags)


@pytest.mark.parametrize("protocol", ["bsp", "allreduce"])
@pytest.mark.parametrize(
    "loads",
    [
        LOADS,
        "    if pace.lead:\n        model[2].load_state_dict(last)\n",
        "    nn.ModuleDict({'inner': model}).load_state_dict({f'inner.{k}': v for k, v in first.items()})\n",
    ],
    ids=["all ranks", "a part, by rank 0", "from around it"],
)
def test_loading_into_a_model_that_all_share_is_a_mistake(
    shell: Shell, in_scripts: Write, protocol: str, loads: str
) -> None:
    done = train(shell, in_scripts(HEAD + LOOP + loads), protocol)
    assert done.code == 2
    assert "load_state_dict()" in done.error
    assert "--private-weights" in done.error


@pytest.mark.parametrize(
    "loads",
    [
        "    copy.deepcopy(model).load_state_dict(first)\n",
        "    nn.Sequential(nn.BatchNorm1d(2, affine=False)).load_state_dict({}, strict=False)\n",
        ENDS + LOADS.lstrip(),
    ],
    ids=["a copy", "another model", "after leaving"],
)
def test_loading_elsewhere_or_after_leaving_is_no_mistake(
    shell: Shell, in_scripts: Write, loads: str
) -> None:
    assert train(shell, in_scripts(HEAD + LOOP + loads), "bsp").code == 0


def test_private_weights_take_what_is_loaded(shell: Shell, in_scripts: Write) -> None:
    assert train(shell, in_scripts(HEAD + LOOP + LOADS), "bsp", "--private-weights").code == 0


RENORMED = HEAD.replace("nn.Embedding(8, 4)", "nn.Embedding(8, 4, max_norm=0.1)")


@pytest.mark.parametrize("protocol", ["bsp", "allreduce"])
def test_a_layer_that_writes_to_its_weights_is_refused_where_all_share_them(
    shell: Shell, in_scripts: Write, protocol: str
) -> None:
    done = train(shell, in_scripts(RENORMED + LOOP), protocol)
    assert done.code == 2
    assert "max_norm" in done.error
    assert "'0'" in done.error


def test_replicas_that_are_never_averaged_are_said_to_drift_by_it(shell: Shell, in_scripts: Write) -> None:
    done = train(shell, in_scripts(RENORMED + LOOP), "allreduce", "--private-weights")
    assert done.code == 0
    assert "rows of their own batches" in done.err


@pytest.mark.parametrize("protocol", ["bsp", "allreduce"])
def test_a_rank_that_crashes_alone_is_no_success(shell: Shell, in_scripts: Write, protocol: str) -> None:
    writes = "    if pace.lead and step == 1:\n        model[2].weight.data.clamp_(-1, 1)\n"
    script = in_scripts(HEAD + LOOP + writes)
    done = train(shell, script, protocol)
    assert done.code == 1
    assert "Rank 0 ended by SIGSEGV (a write to the shared weights? see --private-weights)" in done.error
    assert f" in {script.name}, line {len(script.read_text().splitlines())}." in done.error
