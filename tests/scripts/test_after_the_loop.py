"""After the loop: every worker's model is what the run saves, and its state can be saved and loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.trace.events import Note
from support.runs import Lab
from support.shell import Shell
from support.tensors import assert_close, assert_equal

SCRIPT = Path(__file__).parent / "digits_like.py"


@pytest.mark.parametrize(
    ("protocol", "fabric"),
    [
        ("bsp", "shared"),
        ("dssp", "shared"),
        ("asp", "shared"),
        ("allreduce", "shared"),
        ("local_sgd", "shared"),
        ("local_sgd", "gloo"),
    ],
)
def test_who_has_left_holds_the_very_model_that_the_run_saves(
    lab: Lab, tmp_path: Path, protocol: str, fabric: str
) -> None:
    dials = {"slow": {1: 3.0}, "device_time_s": 0.002}
    run = lab.trained(SCRIPT, tmp_path, workers=3, protocol=protocol, fabric=fabric, **dials)
    for rank in range(3):
        assert_equal(load_file(tmp_path / f"model{rank}.safetensors"), run.weights)


@pytest.mark.parametrize(
    ("protocol", "fabric", "workers"),
    [("bsp", "shared", 2), ("allreduce", "shared", 2), ("allreduce", "gloo", 2), ("bsp", "shared", 1)],
)
def test_what_is_saved_and_loaded_goes_on_as_if_nothing_had_happened(
    lab: Lab, tmp_path: Path, protocol: str, fabric: str, workers: int
) -> None:
    """The data are not shuffled, so an epoch is like any other: two, and one and one, are the same."""
    dials = {"protocol": protocol, "fabric": fabric, "workers": workers}
    whole = lab.trained(SCRIPT, tmp_path, **dials)
    rest = lab.trained(SCRIPT, tmp_path, "--load", tmp_path / "saved0", **dials)
    assert_close(*(_trained(run.weights) for run in (rest, whole)), 1e-6)


def _trained(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without BatchNorm's statistics: every worker has its own, and all go on with those that were saved."""
    return {name: tensor for name, tensor in weights.items() if not name.startswith("1.running")}


@pytest.mark.parametrize("protocol", ["bsp", "dssp", "allreduce", "local_sgd"])
def test_the_state_of_an_optimizer_is_saved_and_loaded_by_a_script(
    lab: Lab, tmp_path: Path, protocol: str
) -> None:
    run = lab.trained(SCRIPT, tmp_path, "--stay", workers=2, protocol=protocol)
    state = torch.load(tmp_path / "optimizer0.pt", weights_only=True)
    assert {
        key: value["momentum_buffer"].any().item() for key, value in state["state"].items()
    } == dict.fromkeys(range(6), True)
    assert state["param_groups"][0]["fused"] is None
    warned = [note.text for note in run.of(Note) if "model.state_dict()" in note.text]
    assert bool(warned) == (protocol in ("dssp", "local_sgd")), warned


LEAVES = """
import sys, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.join()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(torch.ones(24, 2)), batch_size=2)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for (x,) in loader:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
pace.leave()
state = optimizer.state_dict()["state"]
assert all("momentum_buffer" in each for each in state.values()) and len(state) == 2, state
if pace.rank == int(sys.argv[1]):
    raise ValueError("after all is done")
"""


@pytest.mark.parametrize("protocol", ["bsp", "dssp", "allreduce", "local_sgd"])
def test_who_has_left_has_the_optimizers_state_and_a_late_error_is_not_a_success(
    shell: Shell, tmp_path: Path, protocol: str
) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    done = shell("train", script, "-p", protocol, "-n", 2, "--", -1)
    assert done.code == 0, done.err
    failed = shell("train", script, "-p", protocol, "-n", 2, "--", 1)
    assert failed.code == 1
    assert "the script of rank 1 failed after it had left" in failed.error
