"""A run of peers that was stopped goes on where it was."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.test_resume import EPOCHS, SAMPLES, SIZES, first_part, in_two_parts
from paceline.protocols import PEERS
from paceline.protocols.settings import make_peer
from support.runs import Lab, once
from support.tensors import assert_close, assert_equal
from support.tight import TIGHT

RESUMABLE = [name for name in sorted(PEERS) if make_peer(name, TIGHT.get(name, {})).resumable]
FLUSHED = {"hpsgd", "fedavg", "osp"}
"""A stop brings what these have under way to an early end: they go on, but not as if nothing had been."""


@pytest.mark.parametrize("name", ["noisy", "adamw"])
@pytest.mark.parametrize("protocol", sorted(set(RESUMABLE) - FLUSHED))
def test_stopped_and_resumed_it_equals_the_uninterrupted_run_bit_for_bit(
    lab: Lab, protocol: str, name: str
) -> None:
    """Replicas, optimizers, random numbers, what the protocol remembers, and who reads which data."""
    dials: dict[str, Any] = {
        "workers": 3,
        "protocol": protocol,
        "settings": TIGHT.get(protocol, {}),
        "seed": 3,
    }
    if protocol == "ds_sync":
        dials["settings"] = {"pattern": "random", "group_size": 2}
    first, second = in_two_parts(lab, name, "--shuffle", before=5, **dials)
    whole = lab.trained("train.py", name, *SIZES, "--shuffle", **dials)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)
    assert_equal(second.weights, whole.weights)


@pytest.mark.parametrize("before", [6, 7, 8])
def test_it_does_so_at_the_turn_of_an_epoch_too(lab: Lab, before: int) -> None:
    """A loader draws a random number when a pass begins, and dropout goes on from there."""
    dials: dict[str, Any] = {"workers": 3, "protocol": "local_sgd", "settings": {"period": 4}, "seed": 3}
    _, second = in_two_parts(lab, "noisy", "--shuffle", before=before, **dials)
    whole = lab.trained("train.py", "noisy", *SIZES, "--shuffle", **dials)
    assert_equal(second.weights, whole.weights)


@pytest.mark.parametrize("protocol", sorted(set(RESUMABLE) - FLUSHED))
def test_it_does_so_over_gloo_too(lab: Lab, protocol: str) -> None:
    """Nobody but a worker itself has its replica there, and it stays until the mean of all is taken."""
    dials: dict[str, Any] = {
        "workers": 3,
        "protocol": protocol,
        "settings": TIGHT.get(protocol, {}),
        "seed": 3,
        "fabric": "gloo",
    }
    if protocol == "ds_sync":
        dials["settings"] = {"pattern": "random", "group_size": 2}
    first, second = in_two_parts(lab, "noisy", "--shuffle", before=5, **dials)
    whole = lab.trained("train.py", "noisy", *SIZES, "--shuffle", **dials)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)
    assert_equal(second.weights, whole.weights)


@pytest.mark.parametrize("apart", [False, True])
def test_one_model_for_all_and_one_each_do_not_go_on_from_each_other(lab: Lab, apart: bool) -> None:
    """Where all have one, its optimizer's state is the run's; else it is the workers'."""
    asked: dict[str, Any] = {"workers": 2, "protocol": "allreduce"}
    first = first_part(lab, "momentum", **asked, private_weights=apart)
    folder = str(first.folder / "checkpoint")
    run = lab.run("train.py", "momentum", *SIZES, resume=folder, **asked, private_weights=not apart)
    assert run.end.user_mistake
    assert "--private-weights" in run.end.detail


@pytest.mark.parametrize("fabric", ["shared", "gloo"])
@pytest.mark.parametrize("protocol", sorted(FLUSHED))
def test_a_round_that_was_cut_short_is_not_lost(lab: Lab, protocol: str, fabric: str) -> None:
    dials: dict[str, Any] = {
        "workers": 3,
        "protocol": protocol,
        "settings": TIGHT[protocol],
        "slow": {2: 3.0},
        "fabric": fabric,
    }
    first, second = in_two_parts(lab, "momentum", waiting=1, **dials)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)
    whole = lab.trained("train.py", "momentum", *SIZES, **dials)
    assert_close(second.weights, whole.weights, 0.3)


@pytest.mark.parametrize(
    ("dials", "words"),
    [
        ({"workers": 2}, "3 peers under 'local_sgd'"),
        ({"settings": {"period": 5}}, "same protocol, settings"),
        ({"protocol": "allreduce", "settings": {}}, "under 'local_sgd'"),
        ({"protocol": "bsp", "settings": {}}, "3 peers under 'local_sgd'"),
    ],
)
def test_only_the_same_peers_can_go_on(lab: Lab, dials: dict[str, Any], words: str) -> None:
    asked: dict[str, Any] = {"workers": 3, "protocol": "local_sgd", "settings": {"period": 4}}
    first = first_part(lab, "momentum", **asked)
    folder = str(first.folder / "checkpoint")
    run = lab.run("train.py", "momentum", *SIZES, resume=folder, **asked | dials)
    assert run.end.user_mistake
    assert words in run.end.detail


@pytest.mark.parametrize(
    "dials",
    [
        {"protocol": "ad_psgd"},
        {"protocol": "fedavg", "settings": {"period": 2, "fraction": 0.5}},
        {"protocol": "allreduce", "compress": "fp16"},
    ],
)
def test_what_cannot_be_resumed_yet_leaves_no_checkpoint(lab: Lab, dials: dict[str, Any]) -> None:
    first = first_part(lab, "momentum", waiting=1, workers=3, **dials)
    assert not (first.folder / "checkpoint").exists()
    assert first.weights
