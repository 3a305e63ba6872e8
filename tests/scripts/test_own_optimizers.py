"""Optimizers that the script has written itself step as they do alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from support.runs import Lab
from support.tensors import assert_close

SCRIPT = Path(__file__).parent / "own_optimizers.py"
STORE_OF_ONE: dict[str, Any] = {"workers": 2, "park": (1,), "protocol": "ssp", "apply": "increments"}


def plain(folder: Path, name: str, batch: int) -> dict[str, Tensor]:
    """What the script trains without Paceline."""
    args = [sys.executable, SCRIPT, "--optimizer", name, "--batch", str(batch), "--plain", folder / "plain"]
    subprocess.run(args, check=True, timeout=60)
    return load_file(folder / "plain")


def test_one_that_replaces_weights_trains_under_increments(lab: Lab, tmp_path: Path) -> None:
    run = lab.trained(SCRIPT, "--optimizer", "assigning", "--batch", 8, **STORE_OF_ONE)
    assert_close(run.weights, plain(tmp_path, "assigning", 8), 1e-12)


def test_one_that_replaces_weights_trains_among_peers(lab: Lab, tmp_path: Path) -> None:
    """Every round is one step of one process with the whole batch."""
    run = lab.trained(SCRIPT, "--optimizer", "assigning", "--batch", 4, workers=2, protocol="allreduce")
    assert_close(run.weights, plain(tmp_path, "assigning", 8), 1e-12)


def test_one_that_replaces_weights_trains_a_replica(lab: Lab) -> None:
    dials = {"workers": 2, "protocol": "local_sgd"}
    ours, torchs = (
        lab.trained(SCRIPT, "--optimizer", name, "--batch", 4, **dials) for name in ("assigning", "sgd")
    )
    assert_close(ours.weights, torchs.weights, 1e-12)


@pytest.mark.parametrize(
    ("batch", "dials"), [(8, STORE_OF_ONE), (4, {"workers": 2, "protocol": "allreduce"})]
)
def test_one_that_counts_its_steps_in_its_groups_goes_on_counting_after_a_resume(
    lab: Lab, tmp_path: Path, batch: int, dials: dict[str, Any]
) -> None:
    args = ("--optimizer", "counting", "--batch", batch)
    running = lab.start(SCRIPT, *args, *lab.pause(9), **dials | {"device_time_s": 0.05})
    lab.until_paused(8 // batch)
    running.stop()
    lab.go_on()
    first = lab.finish(running)
    assert first.result.status == "stopped", first.logs()
    second = lab.trained(SCRIPT, *args, resume=str(first.folder / "checkpoint"), **dials)
    assert_close(second.weights, plain(tmp_path, "counting", 8), 1e-12)


@pytest.mark.parametrize("protocol", ["bsp", "asp"])
def test_one_that_a_store_cannot_rebuild_is_refused(lab: Lab, protocol: str) -> None:
    run = lab.run(SCRIPT, "--optimizer", "assigning", workers=2, protocol=protocol)
    assert run.result.status == "failed"
    assert "is not one of torch.optim" in run.end.detail
