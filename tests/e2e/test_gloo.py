"""Peers over torch.distributed: what shared memory gives, to rounding; and a lost worker ends the run."""

from __future__ import annotations

import os
import signal
import time
from random import Random
from typing import Any

import pytest
import torch

from e2e.scripts.cases import CASES, in_rounds, large_batch
from paceline.protocols import PEERS
from paceline.runtime.meeting.collective import MOST_GROUPS
from paceline.trace.events import Evaluated, Exchanged
from support.runs import Lab, once
from support.tensors import assert_close, assert_equal, assert_finite
from support.tight import TIGHT, every_model

SAMPLES, BATCH, EPOCHS = 50, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
"""Thirteen batches an epoch, the last one short: the last round of each is not full."""
COLLECTIVE = sorted(name for name in PEERS if not PEERS[name]().free)
"""The others exchange one-sidedly, which needs memory that all see."""
every_collective = pytest.mark.parametrize("protocol", COLLECTIVE)


@every_collective
@pytest.mark.parametrize("workers", [2, 4])
def test_both_fabrics_arrive_at_the_same_weights(lab: Lab, protocol: str, workers: int) -> None:
    dials: dict[str, Any] = {"workers": workers, "protocol": protocol, "settings": TIGHT.get(protocol, {})}
    slow = {"device_time_s": 0.002, "slow": {1: 3.0}}
    shared = lab.trained("train.py", "normed", *SIZES, **dials)
    gloo = lab.trained("train.py", "normed", *SIZES, **dials, **slow, fabric="gloo")
    assert_close(gloo.weights, shared.weights, 1e-10)
    assert gloo.used() == once(EPOCHS, SAMPLES)
    kinds = ("operation", "workers", "bytes")
    met = [sorted(tuple(getattr(e, k) for k in kinds) for e in run.of(Exchanged)) for run in (gloo, shared)]
    assert met[0] == met[1]


@every_collective
def test_the_same_seed_repeats_bit_for_bit_however_slow_who_is(lab: Lab, protocol: str) -> None:
    args = ("train.py", "noisy", "--samples", 50, "--batch", 4, "--epochs", 2, "--shuffle")
    settings = TIGHT.get(protocol, {})
    dials: dict[str, Any] = {"workers": 3, "protocol": protocol, "settings": settings, "fabric": "gloo"}
    if protocol == "ds_sync":
        dials["workers"] = 4
    one = lab.trained(*args, **dials, seed=7, device_time_s=0.002, slow={0: 3.0})
    other = lab.trained(*args, **dials, seed=7, device_time_s=0.001, slow={1: 6.0})
    assert_equal(one.weights, other.weights)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_allreduce_equals_one_process_with_the_batches_of_a_round_as_one(
    lab: Lab, name: str, workers: int
) -> None:
    run = lab.trained("train.py", name, *SIZES, workers=workers, protocol="allreduce", fabric="gloo")
    rounds = in_rounds(SAMPLES, BATCH, workers, EPOCHS)
    assert_close(run.weights, large_batch(CASES[name], SAMPLES, rounds), 1e-11)
    assert run.result.updates == len(rounds)


@every_model
def test_allreduce_equals_the_large_batch_whatever_the_model(lab: Lab, name: str) -> None:
    """Accumulated, cleared in between or never used: a gradient is averaged as it is at the step."""
    run = lab.trained("train.py", name, *SIZES, workers=2, protocol="allreduce", fabric="gloo")
    reference = large_batch(CASES[name], SAMPLES, in_rounds(SAMPLES, BATCH, 2, EPOCHS))
    assert_close(run.weights, reference, 1e-5 if name == "two_types" else 1e-10)
    assert ("averaged at the step from now on" in str(run.trace)) == (name in ("accumulated", "scaled"))


@pytest.mark.parametrize(("workers", "samples"), [(5, 50), (7, 120)])
def test_groups_drawn_at_random_mix_as_with_shared_memory(lab: Lab, workers: int, samples: int) -> None:
    """Among seven workers there are more groups than are connected for good: some exchange by pairs. Sums are
    rounded differently, and batch norm on two samples makes more of that: 4e-10 on one processor."""
    settings = {"pattern": "random", "group_size": 3}
    dials: dict[str, Any] = {"workers": workers, "protocol": "ds_sync", "settings": settings}
    sizes = ("--samples", samples, "--batch", 2, "--epochs", 3)
    runs = [lab.trained("train.py", "normed", *sizes, **dials, fabric=f) for f in ("gloo", "shared")]
    assert_close(runs[0].weights, runs[1].weights, 1e-8)
    groups = {event.workers for event in runs[0].of(Exchanged)}
    assert (len(groups) > MOST_GROUPS) == (workers == 7)


@pytest.mark.parametrize("topology", ["exponential", "one_peer", "matching", "complete", "graph"])
def test_every_topology_mixes_as_with_shared_memory(lab: Lab, topology: str) -> None:
    settings = {"topology": topology} | ({"graph": "0-1,1-2,2-3,3-4:0.2"} if topology == "graph" else {})
    dials: dict[str, Any] = {"workers": 5, "protocol": "dpsgd", "settings": settings}
    runs = [lab.trained("train.py", "momentum", *SIZES, **dials, fabric=f) for f in ("gloo", "shared")]
    assert_close(runs[0].weights, runs[1].weights, 1e-10)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_hpsgd_applies_every_gradient_exactly_once_while_averages_travel(lab: Lab, length: int) -> None:
    """Whole numbers and quarters add up exactly; rank 0 has one iteration more than the others."""
    sizes = ("--samples", 52, "--batch", 4, "--epochs", 1)
    dials: dict[str, Any] = {"device_time_s": 0.004, "jitter": 0.5, "settings": {"round_length": length}}
    run = lab.trained("train.py", "exact", *sizes, workers=4, protocol="hpsgd", fabric="gloo", **dials)
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(52)
    assert torch.equal(run.weights["w"], model.state_dict()["w"] - x.sum(0) / 4)


def test_selsync_takes_the_same_branch_on_all_ranks(lab: Lab) -> None:
    """A worker on another branch would end the run with an error that says so."""
    settings = {"window": 2, "delta": 0.3}
    dials: dict[str, Any] = {"workers": 3, "protocol": "selsync", "settings": settings, "fabric": "gloo"}
    run = lab.trained("train.py", "momentum", *SIZES, **dials)
    averages = [e for e in run.of(Exchanged) if e.operation == "average"]
    votes = [e for e in run.of(Exchanged) if e.operation == "agree"]
    assert 0 < len(averages) < len(votes)


# -- evaluation and what is saved ---------------------------------------------------------------------


@pytest.mark.parametrize("who", ["all", "lead"])
@every_collective
def test_evaluating_the_mean_disturbs_nothing(lab: Lab, protocol: str, who: str) -> None:
    workers = 4 if protocol == "ds_sync" else 3
    dials: dict[str, Any] = {"workers": workers, "protocol": protocol, "settings": TIGHT.get(protocol, {})}
    plain = lab.trained("peers.py", "momentum", "--evaluate", "none", **dials, fabric="gloo")
    run = lab.trained("peers.py", "momentum", "--evaluate", who, **dials, fabric="gloo")
    assert_equal(run.weights, plain.weights)
    assert len(run.of(Evaluated)) == 3
    assert all(event.values["consensus_distance"] >= 0 for event in run.of(Evaluated))


def test_what_is_evaluated_last_is_what_is_saved(lab: Lab) -> None:
    dials: dict[str, Any] = {"workers": 3, "protocol": "local_sgd", "settings": {"period": 5}}
    run = lab.trained("peers.py", "momentum", **dials, fabric="gloo")
    last = run.of(Evaluated)[-1]
    assert last.values["total"] == pytest.approx(sum(float(t.sum()) for t in run.weights.values()))
    assert last.values["consensus_distance"] > 0


@pytest.mark.parametrize("protocol", ["allreduce", "local_sgd", "dpsgd", "hpsgd"])
def test_a_stopped_run_saves_the_mean(lab: Lab, protocol: str) -> None:
    sizes = ("--epochs", 100_000)
    running = lab.start("train.py", "momentum", *sizes, workers=3, protocol=protocol, fabric="gloo")
    running.until_pushes(10)
    running.stop()
    run = lab.finish(running)
    assert run.result.status == "stopped", run.end.detail
    assert "not the mean" not in str(run.trace)
    assert_finite(run.weights)


# -- trouble ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@every_collective
def test_a_killed_worker_ends_the_run_with_its_rank_named(lab: Lab, protocol: str, seed: int) -> None:
    random = Random(f"{protocol}/{seed}")
    dials: dict[str, Any] = {"workers": 4, "device_time_s": 0.003, "fabric": "gloo"}
    settings = TIGHT.get(protocol, {})
    sizes = ("--epochs", 100_000)
    running = lab.start("train.py", "momentum", *sizes, protocol=protocol, settings=settings, **dials)
    running.until_pushes(10)
    time.sleep(random.uniform(0, 0.1))
    victim = random.randrange(4)
    running.kill(victim)
    run = lab.finish(running)
    assert run.result.status == "failed"
    assert f"rank {victim} was lost" in run.end.detail
    assert run.ended.statuses == {rank: -signal.SIGKILL if rank == victim else 0 for rank in range(4)}
    assert_finite(run.weights)


def test_a_script_that_fails_ends_the_run_with_its_rank_named(lab: Lab) -> None:
    script = lab.script(
        "import sys, torch, paceline\n"
        "pace = paceline.join()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "pace.prepare(model, optimizer)\n"
        "for step in range(100_000):\n"
        "    assert pace.rank != 1 or step < 5, 'enough'\n"
        "    model(torch.ones(3, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    run = lab.run(script, workers=3, protocol="allreduce", fabric="gloo")
    assert run.result.status == "failed"
    assert "rank 1 was lost" in run.end.detail
    assert [(failure.worker, failure.detail) for failure in run.result.failures] == [
        (1, "AssertionError: enough")
    ]


@pytest.mark.parametrize("protocol", ["allreduce", "local_sgd"])
def test_a_gradient_that_is_not_finite_stops_the_run_with_rank_and_parameter_named(
    lab: Lab, protocol: str
) -> None:
    run = lab.run("peers.py", "momentum", "--bad", 1, workers=3, protocol=protocol, fabric="gloo")
    assert run.result.status == "failed"
    assert "rank 1 has NaN or infinity in the gradient of '0.weight'" in run.end.detail


@pytest.mark.parametrize("protocol", ["allreduce", "local_sgd"])
def test_or_is_skipped_as_with_shared_memory(lab: Lab, protocol: str) -> None:
    dials: dict[str, Any] = {"workers": 3, "protocol": protocol, "bad_gradient": "skip"}
    runs = [lab.trained("peers.py", "momentum", "--bad", 1, **dials, fabric=f) for f in ("gloo", "shared")]
    assert_close(runs[0].weights, runs[1].weights, 1e-10)
    assert all("rank 1: 1 gradients were not finite and were skipped" in str(run.trace) for run in runs)
    assert "averaged at the step" not in str(runs[0].trace), (
        "one bad gradient is no reason to give up overlap"
    )


def test_a_script_with_a_process_group_of_its_own_is_told(lab: Lab) -> None:
    script = lab.script(
        "import os, torch, torch.distributed as dist, paceline\n"
        "pace = paceline.join()\n"
        "store = dist.FileStore(os.path.join(os.path.dirname(__file__), f'own{pace.rank}'), 1)\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    run = lab.run(script, workers=2, protocol="allreduce", fabric="gloo")
    assert run.end.user_mistake
    assert "init_process_group" in run.end.detail


@pytest.mark.parametrize(("protocol", "settings"), [("ad_psgd", {}), ("easgd", {"mode": "asynchronous"})])
def test_a_one_sided_protocol_is_refused_with_the_reason(
    lab: Lab, protocol: str, settings: dict[str, Any]
) -> None:
    dials: dict[str, Any] = {"workers": 2, "protocol": protocol, "settings": settings, "fabric": "gloo"}
    run = lab.run("train.py", "momentum", *SIZES, **dials)
    assert run.end.user_mistake
    assert f"{protocol!r} with these settings exchanges one-sidedly" in run.end.detail
    assert "Use --fabric shared" in run.end.detail


def test_a_paced_protocol_that_the_script_names_is_refused(lab: Lab) -> None:
    run = lab.run("peers.py", "momentum", "--protocol", "ssp", workers=2, fabric="gloo")
    assert run.end.user_mistake
    assert "'ssp' is of the paced family" in run.end.detail


def test_what_a_worker_leaves_behind_that_ends_its_loop_early_is_done_by_the_others(lab: Lab) -> None:
    script = lab.script(
        "import torch, paceline\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "pace = paceline.join()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = DataLoader(TensorDataset(torch.ones(40, 2)), batch_size=4)\n"
        "model, optimizer, loader = pace.prepare(model, optimizer, loader)\n"
        "for _ in pace.epochs(2):\n"
        "    for step, (x,) in enumerate(loader):\n"
        "        if pace.rank == 1 and step == 2:\n"
        "            raise SystemExit\n"
        "        model(x).sum().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
    )
    for fabric in ("gloo", "shared"):
        run = lab.trained(script, workers=3, protocol="allreduce", fabric=fabric)
        assert run.used() == once(2, 40)


@pytest.mark.parametrize("protocol", ["allreduce", "dpsgd"])
def test_batches_may_be_loaded_by_processes_that_inherit_the_connections(lab: Lab, protocol: str) -> None:
    dials: dict[str, Any] = {"workers": 2, "protocol": protocol, "fabric": "gloo"}
    one = lab.trained("train.py", "momentum", *SIZES, "--load-workers", 1, **dials)
    other = lab.trained("train.py", "momentum", *SIZES, **dials)
    assert_equal(one.weights, other.weights)


def test_a_worker_that_dies_while_all_connect_ends_the_run(lab: Lab) -> None:
    """The others wait for it inside of torch, so they are ended from outside after a while."""
    script = lab.script(
        "import os, torch, paceline\n"
        "from paceline.runtime.peer.collective import carrier\n"
        "pace = paceline.join()\n"
        "if pace.rank == 1:\n"
        "    carrier.Collective = lambda *args: os.kill(os.getpid(), 9)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    run = lab.run(script, workers=3, protocol="allreduce", fabric="gloo")
    assert run.result.status == "failed"
    assert "rank 1 was lost" in run.end.detail


@pytest.mark.parametrize("protocol", ["allreduce", "dpsgd"])
def test_workers_end_when_the_owner_of_the_run_is_killed(lab: Lab, protocol: str) -> None:
    sizes = ("--epochs", 100_000)
    running = lab.start("train.py", "momentum", *sizes, workers=3, protocol=protocol, fabric="gloo")
    running.until_pushes(10)
    os.kill(running.store_pid, signal.SIGKILL)
    run = lab.finish(running)
    assert run.ended.statuses == dict.fromkeys(range(3), 1)
    assert all("the store is gone" in run.log(f"rank{rank}") for rank in range(3))
