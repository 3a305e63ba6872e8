"""Peers as real processes: the same numbers as in one process, whoever is fast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from e2e.scripts.cases import CASES, in_rounds, large_batch
from paceline.trace.events import Evaluated, Exchanged, Reported
from support.driven import BATCH, EPOCHS, SAMPLES, SIZES, driven, vector_of
from support.runs import Lab, once
from support.tensors import assert_close, assert_equal
from support.tight import TIGHT, every_model, every_repeating


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_allreduce_equals_one_process_with_the_batches_of_a_round_as_one(
    lab: Lab, name: str, workers: int
) -> None:
    """Fifty samples in fours: an epoch's last batch is short, and its last round is not full."""
    sizes = ("--samples", 50, "--batch", BATCH, "--epochs", EPOCHS)
    run = lab.trained("train.py", name, *sizes, workers=workers, protocol="allreduce")
    rounds = in_rounds(50, BATCH, workers, EPOCHS)
    assert_close(run.weights, large_batch(CASES[name], 50, rounds), 1e-11)
    assert run.used() == once(EPOCHS, 50)
    assert run.result.updates == len(rounds)


@every_repeating
def test_real_processes_arrive_where_the_driver_does(lab: Lab, protocol: str) -> None:
    settings = TIGHT.get(protocol, {})
    dials = {"device_time_s": 0.002, "slow": {1: 3.0}}
    run = lab.trained(
        "train.py", "momentum", *SIZES, workers=4, protocol=protocol, settings=settings, **dials
    )
    torch.testing.assert_close(vector_of(run), driven(protocol, settings, 4), rtol=1e-10, atol=1e-10)
    assert run.used() == once(EPOCHS, SAMPLES)
    assert run.result.samples == EPOCHS * SAMPLES


@every_repeating
def test_the_same_seed_repeats_bit_for_bit_however_slow_who_is(lab: Lab, protocol: str) -> None:
    """Dropout, BatchNorm and a shuffled loader included; no round has to be full."""
    args = ("train.py", "noisy", "--samples", 50, "--batch", 4, "--epochs", 2, "--shuffle")
    dials: dict[str, Any] = {
        "workers": 2,
        "protocol": protocol,
        "settings": TIGHT.get(protocol, {}),
        "seed": 7,
    }
    one = lab.trained(*args, **dials, device_time_s=0.002, slow={0: 3.0})
    other = lab.trained(*args, **dials, device_time_s=0.001, slow={1: 6.0})
    assert_equal(one.weights, other.weights)


@pytest.mark.parametrize("fabric", ["shared", "gloo"])
def test_who_has_done_its_share_counts_however_long_ago(lab: Lab, fabric: str) -> None:
    """Nobody waits for an averaging, so the slow one does most of its iterations when the others are gone."""
    dials: dict[str, Any] = {"workers": 3, "protocol": "local_sgd", "settings": {"period": 100}}
    slow: dict[str, Any] = {"device_time_s": 0.002, "slow": {1: 20.0}}
    run = lab.trained("train.py", "momentum", *SIZES, fabric=fabric, **dials, **slow)
    mean = driven("local_sgd", {"period": 100}, 3)
    torch.testing.assert_close(vector_of(run), mean, rtol=1e-10, atol=1e-10)


def test_local_sgd_with_a_period_of_one_is_allreduce(lab: Lab) -> None:
    args = ("train.py", "momentum", *SIZES)
    one = lab.trained(*args, workers=3, protocol="allreduce")
    other = lab.trained(*args, workers=3, protocol="local_sgd", settings={"period": 1})
    assert_close(other.weights, one.weights, 1e-11)


@every_model
def test_allreduce_equals_the_large_batch_whatever_the_model(lab: Lab, name: str) -> None:
    run = lab.trained("train.py", name, *SIZES, workers=2, protocol="allreduce")
    reference = large_batch(CASES[name], SAMPLES, in_rounds(SAMPLES, BATCH, 2, EPOCHS))
    assert_close(run.weights, reference, 1e-5 if name == "two_types" else 1e-10)


def test_clipping_equals_clipping_the_large_batch(lab: Lab) -> None:
    from e2e.test_models import clipped_large_batch

    sizes = ("--samples", 48, "--batch", 4, "--epochs", 2)
    run = lab.trained("train.py", "momentum", *sizes, workers=2, protocol="allreduce", clip_norm=0.05)
    assert_close(run.weights, clipped_large_batch(0.05), 1e-10)


# -- some of the clients ------------------------------------------------------------------------------


def test_fedavg_with_some_of_the_clients_in_every_round_repeats_and_does_all_the_work(lab: Lab) -> None:
    """BatchNorm's statistics are the clients' too. Those who wait have no data in hand, and nobody hangs."""
    args = ("train.py", "normed", *SIZES)
    dials: dict[str, Any] = {"workers": 4, "protocol": "fedavg", "settings": {"period": 2, "fraction": 0.5}}
    one = lab.trained(*args, **dials, device_time_s=0.002, slow={0: 3.0})
    other = lab.trained(*args, **dials, device_time_s=0.001, slow={2: 4.0})
    assert_equal(one.weights, other.weights)
    assert one.used() == once(EPOCHS, SAMPLES)
    first = sorted(one.pushes, key=lambda push: push.t)[:4]
    assert len({push.pushed for push in first}) == 2, "two of four train in the first round, twice each"


def test_local_sgd_averages_what_optimizers_remember(lab: Lab) -> None:
    """Adam's two moments: three vectors at every averaging. Another model than with moments of one's own."""
    args = ("train.py", "adamw", *SIZES)
    kept, averaged = (
        lab.trained(*args, workers=3, protocol="local_sgd", settings={"period": 4, "optimizer": how})
        for how in ("keep", "average")
    )
    counts = [len(run.of(Exchanged)) for run in (kept, averaged)]
    assert counts[1] == 3 * counts[0]
    assert not torch.equal(kept.weights["0.weight"], averaged.weights["0.weight"])


# -- measuring ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["noisy", "accumulated", "momentum"])
def test_to_measure_the_effective_learning_rate_changes_no_bit_of_training(lab: Lab, name: str) -> None:
    """Dropout, BatchNorm and batches that are accumulated included: data come again, random numbers too."""
    args = ("train.py", name, "--samples", 48, "--batch", 4, "--epochs", 2, "--shuffle")
    plain, measured = (
        lab.trained(*args, workers=3, protocol="dpsgd", settings={"measure_every": every}, seed=3)
        for every in (0, 2)
    )
    assert_equal(plain.weights, measured.weights)
    assert measured.used() == plain.used()
    assert measured.result.samples == plain.result.samples
    told = [event.values for event in measured.of(Reported) if "effective_lr" in event.values]
    assert told
    assert all({"effective_lr", "noise_strength", "weight_variance"} <= values.keys() for values in told)
    assert told[0]["effective_lr"] == pytest.approx(1.0, abs=1e-6), "all begin with the same weights"
    assert told[0]["weight_variance"] == pytest.approx(0.0, abs=1e-12)
    assert told[-1]["weight_variance"] > 0
    summary, shares = measured.result.landscape, [values["effective_lr"] for values in told]
    assert summary is not None
    assert summary.reports == len(told)
    assert summary.effective_lr == pytest.approx(sum(shares) / len(shares))
    assert (summary.lowest, summary.last) == (min(shares), shares[-1])
    assert summary.weight_variance == max(values["weight_variance"] for values in told)
    assert summary.noise_strength == max(values["noise_strength"] for values in told)
    assert plain.result.landscape is None


def test_without_a_loader_nothing_can_be_measured(lab: Lab) -> None:
    settings = {"measure_every": 1}
    run = lab.run("peers.py", "momentum", "--unprepared", workers=2, protocol="dpsgd", settings=settings)
    assert run.end.user_mistake
    assert "no prepared loader" in run.end.detail


# -- evaluation and what is saved -------------------------------------------------------------------


def test_the_mean_of_parameters_and_float_buffers_is_saved(lab: Lab) -> None:
    """Two workers that never meet: the saved model is half of each."""
    args = ("train.py", "normed", "--samples", 32, "--batch", 4, "--epochs", 1)
    run = lab.trained(*args, workers=2, protocol="local_sgd", settings={"period": 1000})
    replicas = []
    for rank in range(2):
        case = CASES["normed"]
        model, optimizer = case.build()
        x, y = case.samples(32)
        for first in range(4 * rank, 32, 8):
            case.iteration(model, optimizer, x[first : first + 4], y[first : first + 4])
        replicas.append(model.state_dict())
    for name in ("0.weight", "1.weight", "1.running_mean", "1.running_var", "3.bias"):
        mean = (replicas[0][name] + replicas[1][name]) / 2
        torch.testing.assert_close(run.weights[name], mean, rtol=1e-12, atol=1e-12)
    assert int(run.weights["1.num_batches_tracked"]) == 4


@pytest.mark.parametrize("who", ["all", "lead"])
@every_repeating
def test_evaluating_the_mean_disturbs_nothing(lab: Lab, protocol: str, who: str) -> None:
    """From one rank or all: the weights are those of a run without; the script looks at its own replica."""
    dials: dict[str, Any] = {"workers": 3, "protocol": protocol, "settings": TIGHT.get(protocol, {})}
    plain = lab.trained("peers.py", "momentum", "--evaluate", "none", **dials)
    run = lab.trained("peers.py", "momentum", "--evaluate", who, **dials)
    assert_equal(run.weights, plain.weights)
    seen = run.of(Evaluated)
    assert len(seen) == 3
    assert all(event.values["consensus_distance"] >= 0 for event in seen)
    if protocol == "allreduce":
        assert all(event.values["consensus_distance"] < 1e-12 for event in seen)


def test_what_is_evaluated_last_is_what_is_saved(lab: Lab) -> None:
    run = lab.trained("peers.py", "momentum", workers=3, protocol="local_sgd", settings={"period": 5})
    last = run.of(Evaluated)[-1]
    assert last.values["total"] == pytest.approx(sum(float(t.sum()) for t in run.weights.values()))
    assert run.result.consensus_distance == last.values["consensus_distance"] > 0


def test_bytes_are_counted_per_exchange(lab: Lab) -> None:
    run = lab.trained("train.py", "momentum", *SIZES, workers=3, protocol="local_sgd", settings={"period": 4})
    size = sum(t.numel() * 8 for t in run.weights.values())
    met = run.of(Exchanged)
    assert [event.operation for event in met] == ["average"] * (SAMPLES * EPOCHS // BATCH // 3 // 4)
    assert all(event.workers == (0, 1, 2) for event in met)
    assert all(size <= event.bytes < size + 1000 for event in met), "but for the padding of few tensors"
    assert run.result.bytes_sent == 3 * sum(event.bytes for event in met)


# -- who names it, who cannot -----------------------------------------------------------------------


def test_a_script_may_name_a_peer_protocol_and_the_command_wins(lab: Lab) -> None:
    named = lab.trained("peers.py", "momentum", "--protocol", "local_sgd", "--period", 2, workers=2)
    assert named.result.protocol == "local_sgd"
    assert named.result.settings["period"] == 2
    flag = lab.trained(
        "peers.py", "momentum", "--protocol", "bsp", workers=2, protocol="diloco", settings={"period": "6"}
    )
    assert flag.result.protocol == "diloco"
    assert flag.result.settings["period"] == 6


def test_one_worker_is_plain_pytorch_or_refused(lab: Lab) -> None:
    run = lab.trained("train.py", "momentum", *SIZES, workers=1, protocol="local_sgd")
    assert run.result.settings["period"] == 8
    reference = large_batch(CASES["momentum"], SAMPLES, in_rounds(SAMPLES, BATCH, 1, EPOCHS))
    assert_close(run.weights, reference, 1e-12)
    refused = lab.run("train.py", "momentum", workers=1, protocol="diloco")
    assert refused.end.user_mistake
    assert "'diloco' would not train as plain PyTorch" in refused.end.detail


@pytest.mark.parametrize(
    ("protocol", "settings", "words"),
    [
        ("dpsgd", {"topology": "graph", "graph": "0-1"}, "not connected"),
        ("ds_sync", {"pattern": "given", "groups": "0,1|2"}, "never mixes all workers"),
        ("ds_sync", {"group_size": 2}, "do not divide 3 workers"),
    ],
)
def test_what_cannot_mix_is_refused_before_anything_is_trained(
    lab: Lab, protocol: str, settings: dict[str, Any], words: str
) -> None:
    run = lab.run("train.py", "momentum", *SIZES, workers=3, protocol=protocol, settings=settings)
    assert run.result.status == "failed"
    assert run.end.user_mistake
    assert words in run.end.detail
    assert not run.pushes
