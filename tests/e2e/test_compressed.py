"""Compression with real processes: the numbers of a compressed exchange, its bytes, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.scripts.cases import CASES, in_rounds, large_batch
from paceline.protocols import PEERS
from paceline.trace.events import Evaluated, Exchanged, Reported
from support.driven import BATCH, EPOCHS, SAMPLES, SIZES, driven, vector_of
from support.runs import Lab, once
from support.tensors import assert_close, assert_equal, assert_finite
from support.tight import TIGHT

WAYS = ["fp16", "bf16", "int8", "topk:0.1", "powersgd:2"]
every_way = pytest.mark.parametrize("way", WAYS)
AVERAGING = sorted(PEERS.keys() - {"dpsgd", "ds_sync", "ad_psgd"})


@pytest.mark.parametrize("way", ["fp16", "bf16"])
@pytest.mark.parametrize("protocol", sorted(PEERS.keys() - {"ad_psgd"}))
def test_real_processes_arrive_where_the_driver_does(lab: Lab, protocol: str, way: str) -> None:
    """The real run makes the very same roundings."""
    settings = TIGHT.get(protocol, {})
    dials = {"device_time_s": 0.002, "slow": {1: 3.0}, "settings": settings, "compress": way}
    run = lab.trained("train.py", "momentum", *SIZES, workers=4, protocol=protocol, **dials)
    torch.testing.assert_close(vector_of(run), driven(protocol, settings, 4, way), rtol=1e-9, atol=1e-9)
    assert run.used() == once(EPOCHS, SAMPLES)


@pytest.mark.parametrize("way", ["fp16", "bf16", "int8", "topk:0.01", "powersgd:4"])
@pytest.mark.parametrize("protocol", ["allreduce", "local_sgd"])
def test_it_still_learns(lab: Lab, protocol: str, way: str) -> None:
    """Handwritten digits: a tenth is what guessing gets."""
    digits = Path(__file__).parents[2] / "examples" / "digits.py"
    run = lab.trained(digits, "--epochs", 3, workers=2, protocol=protocol, compress=way)
    first, *_, last = (event.values for event in run.of(Evaluated))
    assert last["loss"] < 0.6 * first["loss"]
    assert last["accuracy"] > 0.8


@pytest.mark.parametrize(
    ("protocol", "way"),
    [
        (p, w)
        for p in AVERAGING
        for w in ("int8", "topk:0.1", "powersgd:2")
        if (p, w) != ("osp", "powersgd:2")
    ],
)
def test_it_repeats_bit_for_bit_however_slow_who_is(lab: Lab, protocol: str, way: str) -> None:
    dials: dict[str, Any] = {"workers": 2, "protocol": protocol, "compress": way}
    dials["settings"] = TIGHT.get(protocol, {})
    one = lab.trained("train.py", "momentum", *SIZES, **dials, device_time_s=0.002, slow={0: 3.0})
    other = lab.trained("train.py", "momentum", *SIZES, **dials, device_time_s=0.001, slow={1: 6.0})
    assert_equal(one.weights, other.weights)
    assert one.used() == once(EPOCHS, SAMPLES)


def test_fp16_differs_from_none_by_rounding_only(lab: Lab) -> None:
    dials: dict[str, Any] = {"workers": 2, "protocol": "allreduce"}
    plain = lab.trained("train.py", "momentum", *SIZES, **dials, compress="none")
    assert_close(
        plain.weights, large_batch(CASES["momentum"], SAMPLES, in_rounds(48, BATCH, 2, EPOCHS)), 1e-11
    )
    half = lab.trained("train.py", "momentum", *SIZES, **dials, compress="fp16")
    apart = max(float((half.weights[name] - tensor).abs().max()) for name, tensor in plain.weights.items())
    assert 0 < apart < 1e-2


@pytest.mark.parametrize("name", ["two_types", "frozen", "tied", "normed", "zero_first", "accumulated"])
@every_way
def test_whatever_the_model_all_replicas_stay_equal(lab: Lab, name: str, way: str) -> None:
    args = ("apart.py", name, "--ask", 0)
    run = lab.trained(*args, workers=2, protocol="allreduce", compress=way)
    apart = [event.values["consensus_distance"] for event in run.of(Reported)]
    assert len(apart) == 3
    assert max(apart) < 1e-6
    assert_finite(run.weights)


def test_bytes_are_counted_as_they_would_be_sent(lab: Lab) -> None:
    args = ("train.py", "momentum", *SIZES)
    dials: dict[str, Any] = {"workers": 3, "protocol": "local_sgd", "settings": {"period": 4}}
    sent = {}
    for way in ("none", *WAYS):
        run = lab.trained(*args, **dials, compress=way)
        met = run.of(Exchanged)
        assert len(met) == 3
        assert run.result.compress == way
        assert run.result.bytes_sent == 3 * sum(event.bytes for event in met)
        assert run.result.bytes_sent_each == [sum(event.bytes for event in met)] * 3
        sent[way] = run.result.bytes_sent
        whole = sent["none"] if way != "none" else run.result.bytes_received
        assert run.result.bytes_received == min(whole, 2 * sent[way]), "two others' vectors, or the mean"
    assert sent["fp16"] == sent["bf16"] == sent["none"] / 4, "of eight bytes two are left"
    assert sent["none"] / 8 < sent["int8"] < sent["none"] / 7
    assert sent["topk:0.1"] == pytest.approx(0.1 * 12 / 8 * sent["none"], rel=0.05)
    assert sent["powersgd:2"] < sent["none"]


# -- trouble ------------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("protocol", ["allreduce", "local_sgd"])
def test_a_gradient_that_is_not_finite_stops_the_run_with_rank_and_parameter_named(
    lab: Lab, protocol: str, way: str
) -> None:
    run = lab.run("peers.py", "momentum", "--bad", 1, workers=3, protocol=protocol, compress=way)
    assert run.result.status == "failed"
    assert "rank 1 has NaN or infinity in the gradient of '0.weight'" in run.end.detail


@every_way
def test_or_is_skipped_and_spoils_nothing_that_is_remembered(lab: Lab, way: str) -> None:
    dials: dict[str, Any] = {"workers": 3, "protocol": "allreduce", "bad_gradient": "skip", "compress": way}
    run = lab.trained("peers.py", "momentum", "--bad", 1, **dials)
    assert_finite(run.weights)
    assert "rank 1: 1 gradients were not finite and were skipped" in str(run.trace)


@pytest.mark.parametrize("way", ["int8", "topk:0.1", "powersgd:2"])
def test_a_killed_worker_leaves_the_others_to_finish(lab: Lab, way: str) -> None:
    sizes = ("--samples", 240, "--batch", 4, "--epochs", 3)
    dials: dict[str, Any] = {"workers": 3, "device_time_s": 0.003, "compress": way}
    args = ("momentum", *sizes, *lab.pause(5, 1))
    running = lab.start("train.py", *args, protocol="allreduce", **dials)
    lab.until_paused(3)
    lab.go_on()
    running.kill(1)
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    assert run.died == {1}
    assert run.used() == once(3, 240)


@pytest.mark.parametrize(
    ("protocol", "way", "words"),
    [
        ("dpsgd", "topk:0.1", "a protocol that mixes models"),
        ("ds_sync", "int8", "a protocol that averages models in groups"),
        ("osp", "powersgd:2", "'osp' averages some tensors now and others later"),
        ("bsp", "fp16", "'bsp' is paced"),
        (None, "fp16", "'bsp' is paced"),
    ],
)
def test_what_is_not_sound_is_refused_with_the_reason(
    lab: Lab, protocol: str | None, way: str, words: str
) -> None:
    run = lab.run("train.py", "momentum", *SIZES, workers=4, protocol=protocol, compress=way)
    assert run.end.user_mistake
    assert words in run.end.detail


def test_a_lone_peer_has_nothing_to_compress(lab: Lab) -> None:
    run = lab.trained("train.py", "momentum", *SIZES, workers=1, protocol="allreduce", compress="topk")
    reference = large_batch(CASES["momentum"], SAMPLES, in_rounds(SAMPLES, BATCH, 1, EPOCHS))
    assert_close(run.weights, reference, 1e-12)
    refused = lab.run("train.py", "momentum", workers=1, protocol="ssp", compress="topk")
    assert "'ssp' is paced" in refused.end.detail
