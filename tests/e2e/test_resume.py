"""A run that was stopped goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.scripts.cases import CASES
from paceline.protocols import PACED
from support.runs import Lab, Run, Running, once
from support.tensors import assert_equal, assert_finite

SAMPLES, BATCH, EPOCHS = 90, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)


def paused(lab: Lab, *args: Any, before: int = 9, waiting: int = 0, **dials: Any) -> Running:
    """A run in which every worker waits before the same one of its iterations, or at least so many do."""
    pause = ("--pause", lab.root / "go on", "--before", before)
    running = lab.start("train.py", *args, *SIZES, *pause, **dials)
    lab.until_paused(waiting or dials["workers"])
    return running


def first_part(lab: Lab, *args: Any, **dials: Any) -> Run:
    """A run that is stopped in the middle."""
    running = paused(lab, *args, **dials)
    running.stop()
    (lab.root / "go on").touch()
    run = lab.finish(running)
    assert run.result.status == "stopped", f"{run.end}\n{run.logs()}"
    return run


def in_two_parts(lab: Lab, *args: Any, before: int = 9, waiting: int = 0, **dials: Any) -> tuple[Run, Run]:
    """The same run, stopped once and resumed."""
    first = first_part(lab, *args, before=before, waiting=waiting, **dials)
    return first, lab.trained("train.py", *args, *SIZES, resume=str(first.folder / "checkpoint"), **dials)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
@pytest.mark.parametrize(("workers", "before", "waiting"), [(2, 4, 2), (2, 12, 1), (3, 8, 2), (3, 9, 3)])
def test_bsp_stopped_and_resumed_equals_bsp_uninterrupted_bit_for_bit(
    lab: Lab, name: str, workers: int, before: int, waiting: int
) -> None:
    """Momentum and second moments included.

    Some of the stops fall on the last round of an epoch, in which one worker has nothing to do.
    """
    dials = {"workers": workers, "protocol": "bsp", "seed": 3}
    first, second = in_two_parts(lab, name, "--shuffle", before=before, waiting=waiting, **dials)
    whole = lab.trained("train.py", name, *SIZES, "--shuffle", **dials)
    assert_equal(second.weights, whole.weights)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)
    assert second.result.updates == whole.result.updates


@pytest.mark.parametrize("protocol", sorted(PACED))
def test_every_position_is_used_exactly_once_over_both_runs(lab: Lab, protocol: str) -> None:
    first, second = in_two_parts(lab, "momentum", waiting=1, workers=4, protocol=protocol, slow={3: 3.0})
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)
    assert first.result.samples + second.result.samples == EPOCHS * SAMPLES
    assert_finite(second.weights)


def test_what_was_applied_before_the_stop_stays_applied(lab: Lab) -> None:
    """Whole numbers: every gradient of both runs is in the weights exactly once."""
    dials = {"workers": 3, "protocol": "asp", "weighting": "sum", "slow": {2: 3.0}}
    _, second = in_two_parts(lab, "exact", waiting=2, **dials)  # one may wait at the end of an epoch
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    assert torch.equal(second.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0))


def test_a_run_may_be_resumed_with_another_number_of_workers(lab: Lab) -> None:
    first = first_part(lab, "momentum", workers=4, protocol="ssp")
    checkpoint = str(first.folder / "checkpoint")
    second = lab.trained("train.py", "momentum", *SIZES, workers=2, protocol="dssp", resume=checkpoint)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)


def test_what_a_death_left_undone_is_done_after_the_resume(lab: Lab) -> None:
    dials = {"workers": 3, "protocol": "bsp", "on_failure": "stop"}
    running = paused(lab, "momentum", **dials)
    running.kill(1)
    (lab.root / "go on").touch()
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
    folders = {}
    for workers in (1, 2):
        warm_lab.root = tmp_path_factory.mktemp("checkpoint")
        folders[workers] = first_part(warm_lab, "momentum", workers=workers).folder / "checkpoint"
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
