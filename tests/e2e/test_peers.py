"""Peers as real processes: the same numbers as in one process, whoever is fast, whoever dies."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from e2e.scripts.cases import CASES, in_rounds, large_batch
from paceline.protocols import PEERS
from paceline.protocols.settings import make_peer
from paceline.trace.events import Decided, Evaluated, Exchanged, Note, Reported
from support.peers import Crew
from support.runs import Lab, Run, once, wait_until
from support.tensors import assert_close, assert_equal

SAMPLES, BATCH, EPOCHS = 48, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
TIGHT: dict[str, dict[str, Any]] = {
    "diloco": {"period": 3},
    "easgd": {"period": 2},
    "fedavg": {"period": 3},
    "hpsgd": {"round_length": 2},
    "local_sgd": {"period": 3},
    "osp": {"overlap": 0.6, "ramp": "constant", "rank_every": 2, "small_bytes": 0},
    "selsync": {"window": 2, "delta": 0.02},
}
every_peer = pytest.mark.parametrize("protocol", sorted(PEERS))
every_repeating = pytest.mark.parametrize(
    "protocol", [name for name in sorted(PEERS) if make_peer(name, TIGHT.get(name, {})).repeats]
)


def driven(protocol: str, settings: dict[str, Any], workers: int, case: str = "momentum") -> Tensor:
    """The same run in one process: the case's gradients, batches dealt in turn, the mean in the end."""
    chosen = CASES[case]
    model, _ = chosen.build()
    x, y = chosen.samples(SAMPLES)
    rounds = in_rounds(SAMPLES, BATCH, 1, EPOCHS)

    def gradient(rank: int, iteration: int, at: Tensor) -> Tensor:
        vector_to_parameters(at, model.parameters())
        model.zero_grad()
        indices = rounds[iteration * workers + rank]
        torch.nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        return parameters_to_vector([p.grad for p in model.parameters()])  # type: ignore[misc]

    start = parameters_to_vector(model.parameters()).detach()
    crew = Crew(
        make_peer(protocol, settings),
        workers,
        gradient,
        initial=lambda rank: start,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
        tensors=[p.numel() for p in model.parameters()],
    )
    crew.run(len(rounds) // workers)
    crew.settle()
    return torch.stack(crew.models()).mean(0)


def weights(run: Run, case: str = "momentum") -> Tensor:
    model, _ = CASES[case].build()
    model.load_state_dict(run.weights, strict=True)
    return parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_allreduce_equals_one_process_with_the_batches_of_a_round_as_one(
    lab: Lab, name: str, workers: int
) -> None:
    """Fifty samples in fours: an epoch's last batch is short, rounds span epochs, the last is not full."""
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
    torch.testing.assert_close(weights(run), driven(protocol, settings, 4), rtol=1e-10, atol=1e-10)
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
    torch.testing.assert_close(weights(run), mean, rtol=1e-10, atol=1e-10)


def test_local_sgd_with_a_period_of_one_is_allreduce(lab: Lab) -> None:
    args = ("train.py", "momentum", *SIZES)
    one = lab.trained(*args, workers=3, protocol="allreduce")
    other = lab.trained(*args, workers=3, protocol="local_sgd", settings={"period": 1})
    assert_close(other.weights, one.weights, 1e-11)


@pytest.mark.parametrize(
    "name",
    [
        "tied",
        "frozen",
        "two_types",
        "zero_first",
        "zero_between",
        "accumulated",
        "groups",
        "outside",
        "closure",
        "scaled",
    ],
)
def test_allreduce_equals_the_large_batch_whatever_the_model(lab: Lab, name: str) -> None:
    run = lab.trained("train.py", name, *SIZES, workers=2, protocol="allreduce")
    reference = large_batch(CASES[name], SAMPLES, in_rounds(SAMPLES, BATCH, 2, EPOCHS))
    assert_close(run.weights, reference, 1e-5 if name == "two_types" else 1e-10)


def test_clipping_equals_clipping_the_large_batch(lab: Lab) -> None:
    from e2e.test_models import clipped_large_batch

    sizes = ("--samples", 48, "--batch", 4, "--epochs", 2)
    run = lab.trained("train.py", "momentum", *sizes, workers=2, protocol="allreduce", clip_norm=0.05)
    assert_close(run.weights, clipped_large_batch(0.05), 1e-10)


# -- overlap ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("length", [0, 1, 3])
def test_hpsgd_applies_every_gradient_exactly_once_while_averages_travel(lab: Lab, length: int) -> None:
    """Whole numbers and quarters add up exactly: the weights are the start minus the mean of all sums."""
    dials: dict[str, Any] = {"device_time_s": 0.004, "jitter": 0.5, "settings": {"round_length": length}}
    run = lab.trained("train.py", "exact", *SIZES, workers=4, protocol="hpsgd", **dials)
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    assert torch.equal(run.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0) / 4)
    assert overlapped(run)


@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_osp_applies_every_gradient_exactly_once_while_averages_travel(lab: Lab, overlap: float) -> None:
    settings = {"overlap": overlap, "ramp": "constant", "rank_every": 1, "small_bytes": 0}
    dials: dict[str, Any] = {"device_time_s": 0.004, "jitter": 0.5, "settings": settings}
    run = lab.trained("train.py", "exact", *SIZES, workers=4, protocol="osp", **dials)
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    assert torch.equal(run.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0) / 4)
    assert overlapped(run) == bool(overlap)


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


def test_without_a_loader_nothing_can_be_measured(lab: Lab) -> None:
    settings = {"measure_every": 1}
    run = lab.run("peers.py", "momentum", "--unprepared", workers=2, protocol="dpsgd", settings=settings)
    assert run.end.user_mistake
    assert "no prepared loader" in run.end.detail


# -- one-sided ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_ad_psgd_loses_no_step_and_lets_the_fast_do_more(lab: Lab, topology: str) -> None:
    """Averaging pairs keeps the sum: the mean has moved by the mean of all gradients, to rounding."""
    dials: dict[str, Any] = {"device_time_s": 0.003, "slow": {0: 6.0}, "settings": {"topology": topology}}
    run = lab.trained("train.py", "exact", *SIZES, workers=3, protocol="ad_psgd", **dials)
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    torch.testing.assert_close(run.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0) / 3)
    assert run.used() == once(EPOCHS, SAMPLES)
    done = [sum(push.pushed == rank for push in run.pushes) for rank in range(3)]
    assert done[0] < min(done[1:])
    assert run.result.waiting_share == pytest.approx([0, 0, 0], abs=0.05)


def test_asynchronous_easgd_saves_its_centre(lab: Lab) -> None:
    """With beta 0 the centre stays where it began, however far the replicas go."""
    dials: dict[str, Any] = {"workers": 3, "protocol": "easgd"}
    still = {"mode": "asynchronous", "beta": 0.0, "period": 2}
    run = lab.trained("peers.py", "momentum", settings=still, **dials)
    model, _ = CASES["momentum"].build()
    assert_close(run.weights, model.state_dict(), 1e-15)
    assert all(event.values["consensus_distance"] > 0 for event in run.of(Evaluated))
    moved = lab.trained("peers.py", "momentum", settings={"mode": "asynchronous", "period": 2}, **dials)
    assert not torch.equal(moved.weights["0.weight"], model.state_dict()["0.weight"])


STEADY = """
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.join()
model = torch.nn.Linear(3, 1)
loader = DataLoader(TensorDataset(torch.ones(120, 3)), batch_size=2)
model, optimizer, loader = pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
for (x,) in loader:
    model(x).mean().backward()
    pace.report(loss=0.5)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_deepspark_exchanges_as_often_as_the_reported_loss_says(lab: Lab) -> None:
    """With constant loss: after a period, then every period + 1 iterations, and what is left at the end."""
    period = 3
    settings = {"mode": "asynchronous", "adaptive": True, "period": period}
    dials: dict[str, Any] = {"device_time_s": 0.003, "slow": {0: 3.0}, "settings": settings}
    run = lab.trained(lab.script(STEADY), workers=3, protocol="easgd", **dials)
    for rank in range(3):
        iterations = sum(push.pushed == rank for push in run.pushes)
        rounds, rest = divmod(iterations - period, period + 1)
        assert sum(event.workers == (rank,) for event in run.of(Exchanged)) == 1 + rounds + (rest > 0)
    assert run.result.waiting_share == pytest.approx([0, 0, 0], abs=0.05)


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
    assert last.values["consensus_distance"] > 0


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


# -- trouble ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@every_peer
def test_whoever_is_killed_whenever_the_others_finish_all_the_work(
    lab: Lab, protocol: str, seed: int
) -> None:
    random = Random(f"{protocol}/{seed}")
    dials: dict[str, Any] = {"workers": 4, "device_time_s": 0.003, "slow": {3: 2.0}}
    sizes = ("--samples", 240, "--batch", 4, "--epochs", 3)
    settings = TIGHT.get(protocol, {})
    running = lab.start("train.py", "momentum", *sizes, protocol=protocol, settings=settings, **dials)
    running.until_training()
    for rank in random.sample(range(4), random.randint(1, 3)):
        time.sleep(random.uniform(0, 0.1))
        running.kill(rank)
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(3, 240)
    assert all(run.ended.statuses[rank] == -signal.SIGKILL for rank in run.died)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.weights.values())


@every_peer
def test_who_waits_in_a_meeting_goes_on_when_those_it_waits_for_are_killed(
    lab: Lab, protocol: str, tmp_path: Path
) -> None:
    """One batch each; three never finish theirs and die over it, and the last one does all the work."""
    settings = TIGHT.get(protocol, {}) | ({"period": 1} if "period" in TIGHT.get(protocol, {}) else {})
    running = lab.start("stall.py", tmp_path, workers=4, protocol=protocol, settings=settings)
    wait_until(lambda: len(list(tmp_path.glob("stalled*"))) == 3, "three have stalled")
    running.until_pushes(1)
    for rank in (0, 1, 2):
        running.kill(rank)
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(1, 16)
    assert run.died == {0, 1, 2}


def test_workers_that_name_different_families_are_told_so(lab: Lab, in_scripts: Any) -> None:
    script = in_scripts(
        "import os, sys, paceline\n"
        "from cases import CASES\n"
        "pace = paceline.join(*(['local_sgd'] if paceline.runtime.seat.mine().rank else []))\n"
        "model, optimizer = CASES['momentum'].build()\n"
        "pace.prepare(model, optimizer)\n"
    )
    run = lab.run(script, workers=2)
    assert run.end.user_mistake
    assert "rank 0 does not run protocol 'local_sgd' as the others do" in run.end.detail


def test_a_flag_that_means_nothing_to_peers_is_told(lab: Lab) -> None:
    run = lab.trained("train.py", "momentum", workers=2, protocol="allreduce", weighting="sum")
    assert "--weighting is ignored: under 'allreduce' every worker steps by itself" in str(run.of(Note))


@pytest.mark.parametrize("protocol", ["allreduce", "local_sgd", "dpsgd"])
def test_on_failure_stop_ends_the_run_with_the_rank_named(lab: Lab, protocol: str) -> None:
    sizes = ("--epochs", 100_000)
    dials: dict[str, Any] = {"workers": 3, "device_time_s": 0.003, "on_failure": "stop"}
    running = lab.start("train.py", "momentum", *sizes, protocol=protocol, **dials)
    running.until_pushes(10)
    running.kill(2)
    run = lab.finish(running)
    assert run.result.status == "failed"
    assert "rank 2 died" in run.end.detail


@pytest.mark.parametrize("protocol", ["allreduce", "local_sgd"])
def test_a_gradient_that_is_not_finite_stops_the_run_with_rank_and_parameter_named(
    lab: Lab, protocol: str
) -> None:
    run = lab.run("peers.py", "momentum", "--bad", 1, workers=3, protocol=protocol)
    assert run.result.status == "failed"
    assert "rank 1" in run.end.detail
    assert "NaN or infinity" in run.end.detail
    assert "'0.weight'" in run.end.detail


@pytest.mark.parametrize("protocol", ["allreduce", "local_sgd"])
def test_or_is_skipped_and_counted(lab: Lab, protocol: str) -> None:
    run = lab.trained("peers.py", "momentum", "--bad", 1, workers=3, protocol=protocol, bad_gradient="skip")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.weights.values())
    assert "rank 1: 1 gradients were not finite and were skipped" in str(run.trace)


def test_a_stopped_run_saves_the_mean_beside_its_checkpoint(lab: Lab) -> None:
    running = lab.start("train.py", "momentum", "--epochs", 100_000, workers=2, protocol="local_sgd")
    running.until_pushes(10)
    running.stop()
    run = lab.finish(running)
    assert run.result.status == "stopped"
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.weights.values())
    assert {path.name for path in (run.folder / "checkpoint").glob("rank*.json")} == {
        "rank0.json",
        "rank1.json",
    }
    assert not list(run.folder.glob("*.partial"))
