"""Clipping in a script: of the mean where a round is one step, and never in silence of something else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from paceline.trace.events import Note
from support.runs import Lab, Run
from support.tensors import assert_close

SCRIPT = Path(__file__).parent / "clip_loop.py"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Plain PyTorch: torch's own clipping, and the batch that two workers have together."""
    file = tmp_path_factory.mktemp("plain") / "model.safetensors"
    subprocess.run([sys.executable, SCRIPT, "--batch", "8", "--own", "--save", file], check=True, timeout=60)
    return load_file(file)


def warned(run: Run) -> int:
    return sum("pace.clip_grad_norm_(max_norm)" in note.text for note in run.of(Note))


@pytest.mark.parametrize(
    ("protocol", "fabric"), [("bsp", "shared"), ("allreduce", "shared"), ("allreduce", "gloo")]
)
def test_where_a_round_is_one_step_the_norm_of_the_mean_is_clipped(
    lab: Lab, reference: dict[str, Tensor], protocol: str, fabric: str
) -> None:
    run = lab.trained(SCRIPT, workers=2, protocol=protocol, fabric=fabric)
    assert_close(run.weights, reference, 1e-10)
    assert warned(run) == 0


@pytest.mark.parametrize("protocol", ["bsp", "asp", "local_sgd"])
def test_a_script_that_clips_by_itself_is_told_once_what_that_means(lab: Lab, protocol: str) -> None:
    assert warned(lab.trained(SCRIPT, "--own", workers=2, protocol=protocol)) == 1
