"""`--apply increments`: workers step by themselves, and the store adds what that changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from e2e.scripts.cases import CASES, LARGE_BATCH, Case
from e2e.test_checkpoints import killed_and_resumed
from e2e.test_resume import SIZES as LONGER
from paceline.protocols import PACED, PEERS
from paceline.sim.request import ClusterRequest
from paceline.store.disk.folders import saved_in
from paceline.trace.events import Note
from support.runs import Lab, Run, once
from support.tensors import assert_close, assert_equal, assert_finite, threads

SAMPLES, BATCH, EPOCHS = 96, 4, 2
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
FITTING = ("asp", "ssp", "dssp", "psp", "bounded_ps")
SLOWED: dict[str, Any] = {"workers": 3, "slow": {2: 3.0}, "device_time_s": 0.002, "apply": "increments"}
ALONE: dict[str, Any] = {"workers": 2, "park": (1,), "protocol": "ssp", "apply": "increments"}
"""A store with one worker."""
ALONE_TOO = sorted(LARGE_BATCH.keys() - {"sparse"})
"""Sparse gradients are made dense, so their parts are added up in another order."""


def virtual(workers: int) -> dict[str, Any]:
    """Dials of an exact simulation in which speeds differ."""
    slow = {workers - 1: 2.5} if workers > 1 else {}
    request = ClusterRequest(workers=workers, slow=slow, compute_s=0.1, jitter=0.3, batch=BATCH)
    return {"workers": workers, "cluster": msgspec.to_builtins(request, str_keys=True)}


def all_gradients() -> Tensor:
    """What the case with whole numbers adds up to."""
    x, _ = CASES["exact"].samples(SAMPLES)
    return EPOCHS * x.sum(0)


def beginning() -> Tensor:
    """The weights it begins with."""
    model, _ = CASES["exact"].build()
    return model.state_dict()["w"]


def plain_pytorch(case: Case, steps: int = EPOCHS * SAMPLES // BATCH) -> dict[str, Tensor]:
    """The same training in one process, without Paceline."""
    model, optimizer = case.build()
    x, y = case.samples(SAMPLES)
    for step in range(steps):
        part = slice(step * BATCH % SAMPLES, step * BATCH % SAMPLES + BATCH)
        case.iteration(model, optimizer, x[part], y[part])
    return model.state_dict()


def warnings(run: Run) -> list[str]:
    return [note.text for note in run.of(Note) if note.level == "warning"]


@pytest.mark.parametrize("protocol", FITTING)
def test_the_weights_are_the_beginning_plus_all_increments(lab: Lab, protocol: str) -> None:
    """Whole numbers add up exactly in any order."""
    run = lab.trained("train.py", "exact", *SIZES, protocol=protocol, **SLOWED)
    assert torch.equal(run.weights["w"], beginning() - all_gradients())
    assert run.used() == once(EPOCHS, SAMPLES)
    assert {push.lr_scale for push in run.pushes} == {1.0}


@pytest.mark.parametrize("protocol", FITTING)
def test_no_increment_is_lost_under_a_virtual_clock(lab: Lab, protocol: str) -> None:
    run = lab.trained("train.py", "exact", *SIZES, protocol=protocol, apply="increments", **virtual(4))
    assert torch.equal(run.weights["w"], beginning() - all_gradients())


@pytest.mark.parametrize("after", [3, 11, 20])
def test_no_increment_is_lost_when_a_worker_is_killed(lab: Lab, after: int) -> None:
    """What it pushed is in the weights, and what it had in hand is done by others."""
    running = lab.start("train.py", "exact", *SIZES, protocol="ssp", **SLOWED)
    running.until_pushes(after)
    running.kill(1)
    run = lab.finish(running)
    assert run.result.status == "finished"
    assert torch.equal(run.weights["w"], beginning() - all_gradients())


@pytest.mark.parametrize("name", ["momentum", "adamw", "single", "normed", "tightly_clipped", *ALONE_TOO])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_one_worker_with_a_store_equals_plain_pytorch_bit_for_bit(lab: Lab, name: str) -> None:
    run = lab.trained("train.py", name, *SIZES, **ALONE)
    with threads(1):
        assert_equal(run.weights, plain_pytorch(CASES[name]))


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_one_simulated_worker_equals_plain_pytorch_bit_for_bit(lab: Lab, name: str) -> None:
    run = lab.trained("train.py", name, *SIZES, protocol="ssp", apply="increments", **virtual(1))
    with threads(1):
        assert_equal(run.weights, plain_pytorch(CASES[name]))


@pytest.mark.parametrize("protocol", FITTING)
def test_without_momentum_increments_equal_whole_steps_of_the_store(lab: Lab, protocol: str) -> None:
    dials = {"protocol": protocol, **virtual(4)}
    ours = lab.trained("train.py", "sgd", *SIZES, apply="increments", **dials)
    theirs = lab.trained("train.py", "sgd", *SIZES, weighting="sum", **dials)
    assert_close(ours.weights, theirs.weights, 1e-12)


def test_with_momentum_every_worker_has_its_own(lab: Lab) -> None:
    """Else the store's one momentum, stepped by all pushes, would give the same."""
    dials = {"protocol": "ssp", **virtual(4)}
    ours = lab.trained("train.py", "momentum", *SIZES, apply="increments", **dials)
    theirs = lab.trained("train.py", "momentum", *SIZES, weighting="sum", **dials)
    assert not torch.allclose(*(next(iter(run.weights.values())) for run in (ours, theirs)), atol=1e-3)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_replay_gives_the_same_bits(lab: Lab, name: str) -> None:
    run = lab.trained("train.py", name, *SIZES, protocol="ssp", **SLOWED)
    again = lab.trained("train.py", name, *SIZES, protocol="ssp", replay=str(run.folder), **SLOWED)
    assert_equal(again.weights, run.weights)


def test_an_exact_simulation_repeats_bit_for_bit(lab: Lab) -> None:
    dials = {"protocol": "dssp", "apply": "increments", **virtual(4)}
    one, two = (lab.trained("train.py", "adamw", *SIZES, **dials) for _ in range(2))
    assert_equal(one.weights, two.weights)


# -- checkpoints ------------------------------------------------------------------------------


def stopped(lab: Lab, name: str, **dials: Any) -> Run:
    """A run that is stopped when some worker has begun its ninth iteration; padded, so that it has heard of
    that long before its end."""
    pause = ("--pause", lab.root / "go on", "--before", 9)
    running = lab.start("train.py", name, *SIZES, *pause, **dials | {"device_time_s": 0.05})
    lab.until_paused(1)
    running.stop()
    (lab.root / "go on").touch()
    run = lab.finish(running)
    assert run.result.status == "stopped", run.end
    return run


@pytest.mark.parametrize("name", ["momentum", "noisy_adamw"])
def test_a_stopped_worker_goes_on_with_its_own_optimizer_bit_for_bit(lab: Lab, name: str) -> None:
    first = stopped(lab, name, **ALONE)
    second = lab.trained("train.py", name, *SIZES, resume=str(first.folder / "checkpoint"), **ALONE)
    whole = lab.trained("train.py", name, *SIZES, **ALONE)
    assert_equal(second.weights, whole.weights)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)
    assert not any("optimizer" in text for text in warnings(second))


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_checkpoint_on_the_way_has_the_worker_s_optimizer_bit_for_bit(lab: Lab, name: str) -> None:
    _, second = killed_and_resumed(lab, name, waiting=1, checkpoint_every="4", **ALONE)
    whole = lab.trained("train.py", name, *LONGER, **ALONE)
    assert_equal(second.weights, whole.weights)
    assert not any("optimizer" in text for text in warnings(second))


def test_a_checkpoint_has_every_optimizer_as_it_was_after_its_worker_s_last_push(lab: Lab) -> None:
    """AdamW counts its steps: as many as pushes of its worker are in the weights."""
    dials = SLOWED | {"protocol": "ssp", "checkpoint_every": "5"}
    first, second = killed_and_resumed(lab, "adamw", before=14, waiting=1, **dials)
    folder = saved_in(first.folder)
    assert folder is not None
    version = msgspec.json.decode((folder / "state.json").read_bytes())["version"]
    pushed = Counter(push.pushed for push in first.pushes if push.version <= version)
    moments = load_file(folder / "optimizer.safetensors")
    assert {rank: int(moments[f"{rank}/0.step"]) for rank in range(3)} == dict(pushed)
    assert not any("optimizer" in text for text in warnings(second))
    assert_finite(second.weights)


def test_a_worker_that_the_checkpoint_does_not_know_begins_anew_with_a_warning(lab: Lab) -> None:
    first = stopped(lab, "momentum", protocol="ssp", **SLOWED)
    dials = {"workers": 4, "protocol": "ssp", "apply": "increments"}
    second = lab.trained("train.py", "momentum", *SIZES, resume=str(first.folder / "checkpoint"), **dials)
    assert any("no optimizer state of rank 3" in text for text in warnings(second))


def test_a_checkpoint_of_the_other_form_is_refused(lab: Lab) -> None:
    first = stopped(lab, "momentum", protocol="ssp", **SLOWED)
    checkpoint = str(first.folder / "checkpoint")
    second = lab.run("train.py", "momentum", *SIZES, resume=checkpoint, workers=3, protocol="ssp")
    assert "--apply increments" in second.end.detail
    assert second.result.status == "failed"


# -- what does not go together ----------------------------------------------------------------


@pytest.mark.parametrize("protocol", sorted({*PACED, *PEERS} - {*FITTING}))
def test_protocols_that_make_one_step_of_several_pushes_are_refused(lab: Lab, protocol: str) -> None:
    run = lab.run("train.py", "exact", *SIZES, protocol=protocol, workers=3, apply="increments")
    assert_refused(run)


def test_a_setting_that_has_pushes_held_is_refused_with_the_first_of_them(lab: Lab) -> None:
    dials = {"protocol": "bounded_ps", "settings": {"buffered": True}, "apply": "increments"}
    assert_refused(lab.run("train.py", "exact", *SIZES, workers=3, **dials))


def test_a_correction_is_refused(lab: Lab) -> None:
    dials = {"protocol": "ssp", "apply": "increments", "correct": "dana"}
    assert_refused(lab.run("train.py", "momentum", *SIZES, workers=3, **dials))


def test_the_automatic_correction_is_none_and_the_run_says_so(lab: Lab) -> None:
    dials = {"protocol": "ssp", "apply": "increments", "correct": "auto"}
    run = lab.trained("train.py", "momentum", *SIZES, workers=3, **dials)
    assert any("stale gradients are not corrected" in note.text for note in run.of(Note))


def assert_refused(run: Run) -> None:
    """In one sentence, as a mistake of the user's."""
    assert run.end.status == "failed"
    assert run.end.user_mistake
    assert "--apply" in run.end.detail
    assert "\n" not in run.end.detail
