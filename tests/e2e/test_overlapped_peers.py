"""Peers that exchange while they compute: nothing is lost or counted twice on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from e2e.scripts.cases import CASES, in_rounds, large_batch
from paceline.trace.events import Decided, Exchanged
from paceline.trace.tally import tally as add_up
from support.account import unbooked_s
from support.driven import BATCH, EPOCHS, SAMPLES, SIZES
from support.runs import Lab, Run, once
from support.tensors import assert_close, assert_equal
from support.tight import TIGHT


def overlapped(run: Run) -> bool:
    """Whether there was an average while several of its workers computed.

    By the order of the trace: one that all wait for comes when all but the last have pushed and sleep.
    """
    computing, last, found = set(range(run.config.workers)), run.pushes[-1], False
    for event in run.trace:
        if event is last:
            break
        if isinstance(event, Decided):
            computing = (computing - {event.pushed}) | set(event.release)
        elif isinstance(event, Exchanged):
            found = found or (event.operation == "average" and len(computing.intersection(event.workers)) > 1)
    return found


@pytest.mark.parametrize("settings", [{}, {"round_length": 1}, {"round_length": 3, "delta_kind": "grad_sum"}])
def test_hpsgd_applies_every_gradient_exactly_once_while_averages_travel(
    lab: Lab, settings: dict[str, Any]
) -> None:
    """Whole numbers and quarters add up exactly: the weights are the start minus the mean of all sums."""
    dials: dict[str, Any] = {"device_time_s": 0.004, "jitter": 0.5, "settings": settings}
    run = lab.trained("train.py", "exact", *SIZES, workers=4, protocol="hpsgd", **dials)
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    assert torch.equal(run.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0) / 4)
    assert overlapped(run)


def test_sums_of_gradients_with_adam_are_refused_before_the_first_iteration(lab: Lab) -> None:
    dials: dict[str, Any] = {"protocol": "hpsgd", "settings": {"delta_kind": "grad_sum"}}
    run = lab.run("train.py", "adamw", *SIZES, workers=2, **dials)
    assert run.end.user_mistake
    assert "SGD without momentum only, got AdamW" in run.end.detail
    assert not run.pushes


@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_osp_applies_every_gradient_exactly_once_while_averages_travel(lab: Lab, overlap: float) -> None:
    settings = {"overlap": overlap, "ramp": "constant", "rank_every": 1, "small_bytes": 0}
    dials: dict[str, Any] = {"device_time_s": 0.004, "jitter": 0.5, "settings": settings}
    run = lab.trained("train.py", "exact", *SIZES, workers=4, protocol="osp", **dials)
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    assert torch.equal(run.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0) / 4)
    assert overlapped(run) == bool(overlap)
    later = (EPOCHS * SAMPLES // (4 * BATCH) - 1) * run.weights["w"].nbytes  # nothing before it was ranked
    first = 64  # a whole vector with what aligns it
    assert run.result.sent_ahead == pytest.approx(later / (later + first) if overlap else 0.0)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_osp_with_nothing_put_off_is_allreduce_bit_for_bit(lab: Lab, name: str) -> None:
    """Fifty samples in fours: the last round is not full, and who came furthest is the model.

    Where all have one model, which a faster kernel steps, it is to rounding.
    """
    args = ("train.py", name, "--samples", 50, "--batch", 4, "--epochs", 3)
    each = lab.trained(*args, workers=4, protocol="allreduce", private_weights=True)
    one = lab.trained(*args, workers=4, protocol="allreduce")
    other = lab.trained(*args, workers=4, protocol="osp", settings={"overlap": 0.0})
    assert_equal(each.weights, other.weights)
    assert_close(one.weights, other.weights, 1e-10)


@pytest.mark.parametrize("name", ["tied", "frozen", "two_types", "groups", "outside", "scaled", "adamw"])
def test_osp_puts_off_tensors_of_any_model(lab: Lab, name: str) -> None:
    """All ranks end in one agreed model, near to that of the large batch."""
    settings = {**TIGHT["osp"], "overlap": 1.0}
    run = lab.trained("train.py", name, *SIZES, workers=2, protocol="osp", settings=settings)
    reference = large_batch(CASES[name], SAMPLES, in_rounds(SAMPLES, BATCH, 2, EPOCHS))
    start = CASES[name].build()[0].state_dict()
    assert run.used() == once(EPOCHS, SAMPLES)
    moved = sum(float((reference[key].double() - start[key].double()).norm()) for key in start)
    apart = sum(float((run.weights[key].double() - reference[key].double()).norm()) for key in start)
    assert apart < 0.5 * moved


def test_osp_follows_the_loss_a_script_reports_and_says_so_when_there_is_none(lab: Lab) -> None:
    settings = {**TIGHT["osp"], "ramp": "loss", "ramp_length": 2, "overlap": 1.0}
    told = lab.trained("train.py", "momentum", *SIZES, workers=2, protocol="osp", settings=settings)
    sizes = {event.bytes for event in told.of(Exchanged) if event.operation == "average"}
    assert len(sizes) > 1, "nothing was put off as the loss fell"
    silent = lab.run("peers.py", "momentum", workers=2, protocol="osp", settings=settings)
    assert silent.end.user_mistake
    assert "pace.report(loss=...)" in silent.end.detail


def test_osp_with_a_measured_budget_trains_to_the_end(lab: Lab) -> None:
    settings = {**TIGHT["osp"], "budget": "measured"}
    run = lab.trained("train.py", "adamw", *SIZES, workers=3, protocol="osp", settings=settings)
    assert run.used() == once(EPOCHS, SAMPLES)


def test_dpsgd_mixed_beside_the_gradient_arrives_at_the_same_bits(lab: Lab) -> None:
    args = ("train.py", "momentum", *SIZES)
    one, other = (
        lab.trained(*args, workers=4, protocol="dpsgd", settings={"overlap": overlap})
        for overlap in (False, True)
    )
    assert_equal(one.weights, other.weights)


@pytest.mark.parametrize("protocol", ["osp", "hpsgd", "dpsgd", "local_sgd"])
def test_what_real_peers_wait_for_a_slow_one_is_on_record(lab: Lab, protocol: str) -> None:
    """All its waits, not only the first of an iteration: no more is left of the time than what is awake.

    The fast workers sleep for most of the time. Were that not on record, most of it would be left over.
    """
    settings = {"overlap": 1.0, "ramp": "constant", "rank_every": 1, "small_bytes": 0}
    dials: dict[str, Any] = {"device_time_s": 0.02, "slow": {2: 5.0}}
    dials["settings"] = settings if protocol == "osp" else TIGHT.get(protocol, {})
    run = lab.trained("train.py", "momentum", *SIZES, workers=3, protocol=protocol, **dials)
    tally, left = add_up(run.trace), unbooked_s(run.trace)
    for rank in (0, 1):
        assert -1e-3 <= left[rank] <= tally.present_s[rank] / 2
        assert tally.wait_s[rank] > tally.compute_s[rank]
