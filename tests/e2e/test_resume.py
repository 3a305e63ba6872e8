"""A run that was stopped goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.scripts.cases import CASES
from paceline.protocols import PROTOCOLS
from support.runs import Lab, Run, Running, once
from support.tensors import assert_equal

SAMPLES, BATCH, EPOCHS = 90, 4, 8
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)


def stop(lab: Lab, running: Running) -> Run:
    """Interrupt a run in the middle."""
    running.stop()
    run = lab.finish(running)
    assert run.result.status == "stopped", f"{run.end}\n{run.logs()}"
    return run


def in_two_parts(lab: Lab, *args: Any, after: int = 10, **dials: Any) -> tuple[Run, Run]:
    """The same run, stopped once and resumed."""
    running = lab.start("train.py", *args, *SIZES, device_time_s=0.004, **dials)
    running.until_pushes(after)
    first = stop(lab, running)
    checkpoint = str(first.folder / "checkpoint")
    return first, lab.trained("train.py", *args, *SIZES, resume=checkpoint, **dials)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
@pytest.mark.parametrize("workers", [2, 3])
def test_bsp_stopped_and_resumed_equals_bsp_uninterrupted_bit_for_bit(
    lab: Lab, name: str, workers: int
) -> None:
    """Momentum and second moments included; the stop falls between two rounds."""
    dials = {"workers": workers, "protocol": "bsp", "seed": 3}
    first, second = in_two_parts(lab, name, "--shuffle", after=7 * workers, **dials)
    whole = lab.trained("train.py", name, *SIZES, "--shuffle", **dials)
    assert_equal(second.weights, whole.weights)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)
    assert second.result.updates == whole.result.updates


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
def test_every_position_is_used_exactly_once_over_both_runs(lab: Lab, protocol: str) -> None:
    dials = {"workers": 4, "protocol": protocol, "slow": {3: 3.0}}
    first, second = in_two_parts(lab, "momentum", **dials)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)
    assert first.result.samples + second.result.samples == EPOCHS * SAMPLES
    assert all(bool(torch.isfinite(tensor).all()) for tensor in second.weights.values())


def test_what_was_applied_before_the_stop_stays_applied(lab: Lab) -> None:
    """Whole numbers: every gradient of both runs is in the weights exactly once."""
    _, second = in_two_parts(lab, "exact", workers=3, protocol="asp", weighting="sum", slow={2: 3.0})
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    assert torch.equal(second.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0))


def test_a_run_may_be_resumed_with_another_number_of_workers(lab: Lab) -> None:
    running = lab.start("train.py", "momentum", *SIZES, workers=4, protocol="ssp", device_time_s=0.004)
    running.until_pushes(10)
    first = stop(lab, running)
    checkpoint = str(first.folder / "checkpoint")
    second = lab.trained("train.py", "momentum", *SIZES, workers=2, protocol="dssp", resume=checkpoint)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)


def test_what_a_death_left_undone_is_done_after_the_resume(lab: Lab) -> None:
    dials = {"workers": 3, "protocol": "bsp", "on_failure": "stop"}
    running = lab.start("train.py", "momentum", *SIZES, device_time_s=0.004, **dials)
    running.until_pushes(10)
    running.kill(1)
    first = lab.finish(running)
    assert first.result.status == "failed"
    second = lab.trained("train.py", "momentum", *SIZES, resume=str(first.folder / "checkpoint"), **dials)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)


@pytest.mark.parametrize("name", ["momentum", "noisy_adamw"])
def test_one_worker_stopped_and_resumed_equals_one_uninterrupted_bit_for_bit(lab: Lab, name: str) -> None:
    """The order of a shuffled loader, dropout's random numbers and the optimizer's state go on."""
    first, second = in_two_parts(lab, name, "--shuffle", workers=1)
    whole = lab.trained("train.py", name, *SIZES, "--shuffle", workers=1)
    assert_equal(second.weights, whole.weights)
    assert first.result.samples + second.result.samples == EPOCHS * SAMPLES


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "json"])
@pytest.mark.parametrize("harm", ["missing", "cut short", "garbage"])
def test_a_damaged_checkpoint_is_refused_with_a_clear_error(
    lab: Lab, damaged: dict[int, Path], workers: int, file: str, harm: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in damaged[workers].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    path = next(path for path in folder.iterdir() if path.name.endswith(file))
    spoil(path, harm)
    run = lab.run("train.py", "momentum", *SIZES, workers=workers, resume=str(folder))
    assert run.result.status == "failed"
    assert str(folder) in run.end.detail
    assert "\n" not in run.end.detail


def spoil(path: Path, harm: str) -> None:
    if harm == "missing":
        path.unlink()
    elif harm == "cut short":
        path.write_bytes(path.read_bytes()[:20])
    else:
        path.write_bytes(b"\xff" * 200)


@pytest.fixture(scope="module")
def damaged(warm_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A checkpoint of one worker and one of two, to be damaged."""
    warm_lab.root = tmp_path_factory.mktemp("checkpoints")
    folders = {}
    for workers in (1, 2):
        running = warm_lab.start("train.py", "momentum", *SIZES, workers=workers, device_time_s=0.01)
        running.until_pushes(2)
        folders[workers] = stop(warm_lab, running).folder / "checkpoint"
    return folders


def test_a_checkpoint_of_another_model_is_refused(lab: Lab, damaged: dict[int, Path]) -> None:
    for workers, folder in damaged.items():
        run = lab.run("train.py", "exact", *SIZES, workers=workers, resume=str(folder))
        assert run.result.status == "failed"
        assert "another model" in run.end.detail


@pytest.mark.parametrize(("workers", "other"), [(1, 2), (2, 1)])
def test_one_worker_and_several_cannot_resume_each_other(
    lab: Lab, damaged: dict[int, Path], workers: int, other: int
) -> None:
    run = lab.run("train.py", "momentum", *SIZES, workers=workers, resume=str(damaged[other]))
    assert run.result.status == "failed"
    assert "resume" in run.end.detail
