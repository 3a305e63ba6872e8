"""A run that was killed as a whole goes on from the last checkpoint it took on its way."""

from __future__ import annotations

import os
import signal
from typing import Any

import msgspec
import pytest
import torch

from e2e.scripts.cases import CASES
from e2e.test_resume import EPOCHS, SAMPLES, SIZES, paused
from e2e.test_resume_peers import RESUMABLE, TIGHT
from paceline.protocols import PACED
from paceline.protocols.settings import make_peer
from paceline.store.disk.folders import saved_in
from paceline.trace.events import Kept, Note
from support.runs import Lab, Places, Run, Running, children, once, wait_until
from support.tensors import assert_equal

BOOKS = ("state.json", "lone.json")


def kill_everything(lab: Lab, running: Running) -> Run:
    """Store and workers at once, as when the machine is taken away; the engine that is shared stays."""
    for pid in children(running.engine._process.pid):
        os.kill(pid, signal.SIGKILL)
    return lab.finish(running)


def killed_and_resumed(lab: Lab, *args: Any, **dials: Any) -> tuple[Run, Run]:
    """A run that is killed in the middle, after its first checkpoint, and what goes on from it."""
    waiting, before = dials.pop("waiting", 0), dials.pop("before", 9)
    running = paused(lab, *args, before=before, waiting=waiting, **dials)
    wait_until(lambda: saved_in(running.config.path) is not None, "a checkpoint is on the disk")
    first = kill_everything(lab, running)
    second = lab.trained("train.py", *args, *SIZES, resume=str(saved_in(first.folder)), **dials)
    return first, second


def kept(run: Run) -> Places:
    """What had gone into pushes when the checkpoint was taken."""
    [state] = (path for path in (run.folder / "checkpoint").glob("*.json") if path.name in BOOKS)
    version = msgspec.json.decode(state.read_bytes())["version"]
    last = next(i for i, push in enumerate(run.pushes) if push.version >= version)
    return Run.used_by(run.pushes[: last + 1])


@pytest.mark.parametrize("name", ["momentum", "adamw"])
@pytest.mark.parametrize(("workers", "every"), [(2, "3"), (3, "1"), (2, "0.01s")])
def test_bsp_killed_as_a_whole_and_resumed_equals_bsp_uninterrupted_bit_for_bit(
    lab: Lab, name: str, workers: int, every: str
) -> None:
    dials = {"workers": workers, "protocol": "bsp", "seed": 3}
    first, second = killed_and_resumed(lab, name, "--shuffle", checkpoint_every=every, **dials)
    whole = lab.trained("train.py", name, *SIZES, "--shuffle", **dials)
    assert_equal(second.weights, whole.weights)
    assert kept(first) + second.used() == once(EPOCHS, SAMPLES)
    assert second.result.updates == whole.result.updates
    assert not list(second.folder.glob("checkpoint*")), "a run that has finished needs none"


@pytest.mark.parametrize("protocol", sorted(PACED))
def test_every_position_counts_once_up_to_the_checkpoint_and_after_it(lab: Lab, protocol: str) -> None:
    dials: dict[str, Any] = {"workers": 4, "protocol": protocol, "slow": {3: 3.0}}
    first, second = killed_and_resumed(lab, "momentum", checkpoint_every="4", waiting=1, **dials)
    assert kept(first) + second.used() == once(EPOCHS, SAMPLES)


def test_a_gradient_is_in_the_checkpoint_whole_or_not_at_all(lab: Lab) -> None:
    """Whole numbers: every gradient up to the checkpoint and after it is in the weights exactly once."""
    dials: dict[str, Any] = {"workers": 3, "protocol": "asp", "weighting": "sum", "slow": {2: 3.0}}
    _, second = killed_and_resumed(lab, "exact", checkpoint_every="5", waiting=2, **dials)
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    assert torch.equal(second.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0))


@pytest.mark.parametrize("name", ["momentum", "noisy_adamw"])
def test_one_worker_killed_and_resumed_equals_one_uninterrupted_bit_for_bit(lab: Lab, name: str) -> None:
    _, second = killed_and_resumed(lab, name, "--shuffle", workers=1, checkpoint_every="4", before=30)
    whole = lab.trained("train.py", name, *SIZES, "--shuffle", workers=1)
    assert_equal(second.weights, whole.weights)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_checkpoint_that_cannot_be_written_is_a_warning_and_the_run_goes_on(lab: Lab, workers: int) -> None:
    running = paused(lab, "momentum", before=2, workers=workers, checkpoint_every="3")
    (running.config.path / "checkpoint.partial").write_text("in the way")
    lab.go_on()
    run = lab.finish(running)
    assert run.result.status == "finished"
    [warning] = [note for note in run.of(Note) if note.level == "warning"]
    assert "could not be written" in warning.text
    assert "File exists" in warning.text
    assert not run.of(Kept)


def test_a_run_that_is_stopped_leaves_the_newer_checkpoint(lab: Lab) -> None:
    running = paused(lab, "momentum", workers=2, protocol="bsp", checkpoint_every="3")
    wait_until(lambda: saved_in(running.config.path) is not None, "a checkpoint is on the disk")
    running.stop()
    (lab.root / "go on").touch()
    run = lab.finish(running)
    version = msgspec.json.decode((run.folder / "checkpoint" / "state.json").read_bytes())["version"]
    assert version == run.pushes[-1].version > run.of(Kept)[-1].version
    kept = sorted(path.name for path in run.folder.glob("checkpoint*"))
    assert kept == ["checkpoint", "checkpoint.previous"]


STEADY = [name for name in RESUMABLE if not make_peer(name, TIGHT.get(name, {})).sends_ahead]


@pytest.mark.parametrize("name", ["noisy", "adamw"])
@pytest.mark.parametrize("protocol", STEADY)
def test_peers_killed_as_a_whole_and_resumed_equal_the_uninterrupted_run_bit_for_bit(
    lab: Lab, protocol: str, name: str
) -> None:
    """Nothing is brought to an early end for a checkpoint on the way."""
    dials: dict[str, Any] = {"workers": 3, "protocol": protocol, "settings": TIGHT.get(protocol, {})}
    first, second = killed_and_resumed(lab, name, "--shuffle", checkpoint_every="3", before=8, **dials)
    whole = lab.trained("train.py", name, *SIZES, "--shuffle", **dials)
    assert_equal(second.weights, whole.weights)
    assert kept(first) + second.used() == once(EPOCHS, SAMPLES)
    assert {path.name for path in (first.folder / "checkpoint").glob("rank*.json")} == {
        f"rank{rank}.json" for rank in range(3)
    }


@pytest.mark.parametrize("protocol", ["fedavg", "allreduce"])
def test_peers_that_took_checkpoints_arrive_where_they_do_without(lab: Lab, protocol: str) -> None:
    """To the end of the run, where workers finish one after another; nobody waits for ever."""
    dials: dict[str, Any] = {"workers": 2, "protocol": protocol, "slow": {1: 2.0}}  # 69 batches
    saving = lab.trained("train.py", "momentum", *SIZES, checkpoint_every="1", **dials)
    assert len(saving.of(Kept)) > 3
    assert_equal(saving.weights, lab.trained("train.py", "momentum", *SIZES, **dials).weights)


def test_peers_go_on_when_one_is_killed_that_a_checkpoint_waited_for(lab: Lab) -> None:
    tight = TIGHT["local_sgd"]  # so that nobody is at its pause before the checkpoint is agreed on
    dials: dict[str, Any] = {
        "workers": 3,
        "protocol": "local_sgd",
        "settings": tight,
        "checkpoint_every": "1",
    }
    running = paused(lab, "momentum", **dials)
    wait_until(lambda: saved_in(running.config.path) is not None, "a checkpoint is on the disk")
    running.kill(1)
    (lab.root / "go on").touch()
    run = lab.finish(running)
    assert run.result.status == "finished"
    assert run.used() == once(EPOCHS, SAMPLES)
