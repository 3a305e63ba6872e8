"""Weights that come from elsewhere after every step: a script that writes to them is told, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.shell import Outcome, Shell

Write = Callable[[str], Path]

HEAD = """
import copy, ctypes
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


@pytest.mark.some(3)
@pytest.mark.parametrize("flags", [["bsp"], ["allreduce"], ["bsp", "--private-weights"], ["asp"]], ids=str)
@pytest.mark.parametrize(
    "loads",
    [
        LOADS,
        "    if pace.lead:\n        model[2].load_state_dict(last)\n",
        "    nn.ModuleDict({'inner': model}).load_state_dict({f'inner.{k}': v for k, v in first.items()})\n",
        "    nn.init.zeros_(model[2].weight)\n",
        "    for p in model[2].parameters():\n        p.data.clamp_(-0.01, 0.01)\n",
    ],
    ids=["all ranks", "a part, by rank 0", "from around it", "anew", "clamped"],
)
def test_a_script_that_writes_to_weights_is_told_what_to_do(
    shell: Shell, in_scripts: Write, flags: list[str], loads: str
) -> None:
    done = train(shell, in_scripts(HEAD + LOOP + loads), *flags)
    assert done.code == 2
    assert re.search(r"rank [01] wrote to '[02]\.weight' by itself", done.error)
    assert "pace.after_step(fn)" in done.error
    assert "--private-weights" not in done.error


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


EXCHANGED = """    now = copy.deepcopy(model.state_dict())
    model.load_state_dict(first)
    model(x)
    model.load_state_dict(now)
"""


@pytest.mark.parametrize("protocol", ["bsp", "asp"])
def test_weights_that_are_put_back_before_the_step_are_no_mistake(
    shell: Shell, in_scripts: Write, protocol: str
) -> None:
    assert train(shell, in_scripts(HEAD + LOOP + EXCHANGED), protocol).code == 0


def test_a_write_after_the_last_step_is_said_to_be_no_part_of_the_run(
    shell: Shell, in_scripts: Write
) -> None:
    done = train(shell, in_scripts(HEAD + LOOP + LOADS.lstrip()), "bsp")
    assert done.code == 0
    assert "after its last step: the run saves its own weights" in done.err


EVALUATED = """
def accuracy():
    now = copy.deepcopy(model.state_dict())
    model.load_state_dict(first)
    {then}
    return 0.5

pace.evaluate(accuracy)
"""
PUT_BACK = "model.load_state_dict(now)"
FAMILIES = [["bsp"], ["asp"], ["allreduce"], ["local_sgd"], ["local_sgd", "--fabric", "gloo"]]


@pytest.mark.some(3)
@pytest.mark.parametrize("flags", FAMILIES, ids=str)
def test_a_write_in_an_evaluation_is_refused_by_name(
    shell: Shell, in_scripts: Write, flags: list[str]
) -> None:
    """Alone training goes on with what was written; in a run it would be undone without a word."""
    done = train(shell, in_scripts(HEAD + LOOP + EVALUATED.format(then="pass")), *flags)
    assert done.code == 2
    assert "rank 0 wrote to '0.weight' in the function of pace.evaluate()" in done.error


@pytest.mark.some(2)
@pytest.mark.parametrize("flags", FAMILIES, ids=str)
def test_other_weights_may_be_evaluated_if_the_runs_are_put_back(
    shell: Shell, in_scripts: Write, flags: list[str]
) -> None:
    assert train(shell, in_scripts(HEAD + LOOP + EVALUATED.format(then=PUT_BACK)), *flags).code == 0


REPLACED = "    model[2].weight = nn.Parameter(model[2].weight.detach().clamp(-0.01, 0.01))\n"


@pytest.mark.parametrize("protocol", ["bsp", "local_sgd"])
def test_a_parameter_that_is_replaced_after_prepare_is_refused(
    shell: Shell, in_scripts: Write, protocol: str
) -> None:
    done = train(shell, in_scripts(HEAD + LOOP + REPLACED), protocol)
    assert done.code == 2
    assert "parameter '2.weight' is another object than when the model was prepared" in done.error


RENORMED = HEAD.replace("nn.Embedding(8, 4)", "nn.Embedding(8, 4, max_norm=0.1)")


@pytest.mark.parametrize("protocol", ["bsp", "allreduce", "asp"])
def test_a_layer_that_writes_to_its_weights_is_refused_where_they_come_from_elsewhere(
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
    writes = "    if pace.lead and step == 1:\n        ctypes.string_at(0)\n"
    script = in_scripts(HEAD + LOOP + writes)
    done = train(shell, script, protocol)
    assert done.code == 1
    assert "Rank 0 ended by SIGSEGV" in done.error
    assert f" in {script.name}, line {len(script.read_text().splitlines())}." in done.error
