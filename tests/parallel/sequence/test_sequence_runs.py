"""Whole runs whose sequences are cut over workers: the weights of one process, bytes, stops, refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.parallel.sequence.ways import backward_bytes, forward_bytes
from paceline.trace.events import Evaluated, Kept
from support.runs import Lab, wait_until
from support.shell import Shell

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SHAPE = (4, 5, 7, 8)


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in one.keys() | other.keys():
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-11)


def test_four_workers_train_the_weights_of_one_process_with_the_bytes_of_the_formula(
    lab: Lab, shell: Shell
) -> None:
    alone = lab.trained("frames.py", workers=1)
    split = lab.trained("frames.py", workers=4, mesh={"sequence": 4})
    close(split.weights, alone.weights)
    for one, other in zip(split.of(Evaluated), alone.of(Evaluated), strict=True):
        assert one.values["loss"] == pytest.approx(other.values["loss"], rel=1e-9)
    assert (split.result.samples, split.result.updates) == (32, 8)
    assert (split.result.bytes_by_axis or {})["sequence"] == expected_bytes(alone.weights)
    page = lab.root / "report.html"
    assert shell("report", split.folder, "--out", page).code == 0
    assert "along sequence" in page.read_text()


def expected_bytes(weights: dict[str, Tensor]) -> int:
    """Of all four workers, in two epochs of four batches, each with an evaluation of all 16 samples."""
    switches = 8 * 2 * (forward_bytes("dynamic", SHAPE, 4, 8) + backward_bytes("dynamic", SHAPE, 4, 8))
    evaluated = 2 * 2 * forward_bytes("dynamic", (16, *SHAPE[1:]), 4, 8)
    part = 2 * 7 * 8 * 8 * 3  # a worker's part of one sample, padded to two frames, to three others
    gathers = 8 * 4 * part * 2 + 2 * 16 * part  # the last gather, and the first split's way back
    size = sum(each.numel() for each in weights.values()) * 8
    gradients = 8 * (2 * (size + len(weights) * 8) * 3 // 4)  # and whether each is there
    sums = (8 + 2) * 8 * 3  # of samples that are compared
    begin = (size + torch.get_rng_state().numel()) * 3  # the first worker tells the others
    return 4 * (switches + evaluated + gathers + gradients + sums) + begin


@pytest.mark.parametrize("way", ["ulysses", "ring"])
def test_copies_of_lines_train_the_weights_of_one_process_with_their_batches_together(
    lab: Lab, way: str
) -> None:
    """All begin with the first worker's weights."""
    alone = lab.trained("frames.py", "--batch", 8, workers=1)
    args = ("--way", way, "--fault", "other weights")
    grid = lab.trained("frames.py", *args, workers=4, mesh={"data": 2, "sequence": 2})
    close(grid.weights, alone.weights)
    assert set(grid.result.bytes_by_axis or {}) == {"data", "sequence"}


def test_a_lost_worker_is_named_and_the_run_goes_on_from_its_checkpoint_with_another_line(lab: Lab) -> None:
    whole = lab.trained("frames.py", "--epochs", 12, workers=1)
    args, dials = ("--epochs", 12), {"workers": 4, "mesh": {"sequence": 4}}
    slowly = ("--before", 4, "--slowly", 0.2)  # far from its end when the checkpoint is there
    running = lab.start("frames.py", *args, *slowly, checkpoint_every="3", **dials)
    wait_until(lambda: running.events(Kept) >= 1, "a checkpoint is kept")
    running.kill(2)
    killed = lab.finish(running)
    assert killed.result.status == "failed"
    assert "rank 2 (sequence 2) died" in killed.end.detail
    fewer = {"workers": 2, "mesh": {"sequence": 2}, "resume": str(killed.folder / "checkpoint")}
    resumed = lab.trained("frames.py", *args, **fewer)
    close(resumed.weights, whole.weights)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--time", 1), "dimension 1 has length 1, less than the 2 workers along sequence"),
        (("--space", 1), "dimension 2 has length 1, less than the 2 workers along sequence"),
        (("--heads", 1, "--way", "ulysses"), "1 heads cannot be shared out among 2 workers"),
        (("--fault", "batch norm"), "a block is a BatchNorm2d: it would take its statistics from one"),
        (("--fault", "no line"), "no module of Net has a line"),
        (("--fault", "unsplit"), "the mesh has sequence=2, but nothing is split along it"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_two(shell: Shell, args: tuple[object, ...], said: str) -> None:
    script = Path(__file__).resolve().parents[2] / "e2e" / "scripts" / "frames.py"
    done = shell("train", script, "--mesh", "sequence=2", "--", *args)
    assert done.code == 2, done.err
    assert said in done.error


def test_workers_of_a_line_with_different_samples_end_the_run(lab: Lab) -> None:
    run = lab.run("frames.py", "--fault", "other samples", workers=2, mesh={"sequence": 2})
    assert run.result.status == "failed"
    assert "were given different samples" in run.end.detail


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"^epoch \d+: accuracy ([\d.]+)", text, re.M)]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_example_prints_what_stands_beside_it(shell: Shell) -> None:
    blocks = (EXAMPLES / "spacetime.out").read_text().split("$ ")[1:]
    split, alone = (accuracies(block) for block in blocks)
    done = shell("train", EXAMPLES / "spacetime.py", "--mesh", "sequence=4")
    assert done.code == 0, done.err
    found = accuracies((shell.runs / "latest" / "logs" / "rank0.log").read_text())
    assert len(found) == len(split) == 3
    assert abs(found[-1] - split[-1]) < 0.05  # other processors round otherwise
    command = [sys.executable, EXAMPLES / "spacetime.py"]
    plain = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert abs(accuracies(plain.stdout)[-1] - alone[-1]) < 0.05
