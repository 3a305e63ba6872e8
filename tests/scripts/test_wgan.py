"""Weights that a script clamps after every step (WGAN): as projected SGD under every protocol, or refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.config import RunConfig
from paceline.engines.local import LocalEngine
from paceline.errors import ConfigError
from paceline.parallel.plans.planned_pace import OsdpPace
from paceline.sim.request import ClusterRequest
from support.hosts import Apart
from support.runs import Lab, Run
from support.tensors import assert_close, assert_equal

SCRIPT = Path(__file__).parent / "wgan.py"
LARGEST = 0.01
INCREMENTS = {"protocol": "asp", "apply": "increments"}
WAYS: list[dict[str, Any]] = [
    {"protocol": "local_sgd"},
    {"protocol": "allreduce"},
    {"protocol": "allreduce", "fabric": "gloo"},
    {"protocol": "diloco", "settings": {"period": 3}},
    {"protocol": "bsp"},
    {"protocol": "bsp", "private_weights": True},
    {"protocol": "asp"},
    {"protocol": "ssp"},
    {"protocol": "psp", "settings": {"form": "distributed"}},
    INCREMENTS,
]


def largest(run: Run) -> float:
    """Of the critic's weights."""
    return max(float(w.abs().max()) for name, w in run.weights.items() if not name.startswith("1."))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """One process with the batch that two workers have together."""
    file = tmp_path_factory.mktemp("plain") / "model"
    subprocess.run([sys.executable, SCRIPT, "--batch", "8", "--save", file], check=True, timeout=60)
    return load_file(f"{file}.0")


def test_alone_the_critic_stays_within_its_bounds(alone: dict[str, Tensor]) -> None:
    """And reaches them, else the other tests here would prove nothing."""
    assert max(float(w.abs().max()) for name, w in alone.items() if name.startswith("0.")) == LARGEST


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_critic_stays_within_its_bounds(lab: Lab, way: dict[str, Any]) -> None:
    run = lab.trained(SCRIPT, workers=2, **way)
    assert 0.9 * LARGEST < largest(run) <= LARGEST * (1 + 1e-12)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "way",
    [
        {"protocol": "bsp"},
        {"protocol": "bsp", "private_weights": True},
        {"protocol": "allreduce"},
        {"protocol": "allreduce", "fabric": "gloo"},
    ],
    ids=str,
)
def test_in_lockstep_it_equals_one_process_with_the_whole_batch(
    lab: Lab, alone: dict[str, Tensor], tmp_path: Path, way: dict[str, Any]
) -> None:
    run = lab.trained(SCRIPT, "--save", tmp_path / "m", workers=2, **way)
    assert_close(run.weights, alone, 1e-12)
    for rank in range(2):
        assert_equal(load_file(tmp_path / f"m.{rank}"), run.weights)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "way",
    [{"protocol": "asp"}, {"protocol": "bsp"}, {"protocol": "bsp", "private_weights": True}, INCREMENTS],
    ids=str,
)
def test_without_it_the_write_is_refused_by_name(lab: Lab, way: dict[str, Any]) -> None:
    run = lab.run(SCRIPT, "--raw", workers=2, **way)
    assert run.result.status == "failed"
    assert "wrote to '0.0.weight' by itself" in run.end.detail
    assert "pace.after_step(fn)" in run.end.detail


def virtual(workers: int) -> dict[str, Any]:
    """Under a virtual clock."""
    request = ClusterRequest(
        workers=workers, slow={1: 2.5} if workers > 1 else {}, compute_s=0.1, jitter=0.3, batch=4
    )
    return {"workers": workers, "cluster": msgspec.to_builtins(request, str_keys=True)}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "way", [{"protocol": "asp"}, {"protocol": "bsp"}, INCREMENTS, {"protocol": "local_sgd"}], ids=str
)
def test_an_exact_simulation_repeats_bit_for_bit(lab: Lab, way: dict[str, Any]) -> None:
    first, second = (lab.trained(SCRIPT, **way, **virtual(3)) for _ in range(2))
    assert_equal(first.weights, second.weights)
    assert largest(first) <= LARGEST * (1 + 1e-12)


def test_a_replay_arrives_at_the_same_bits(lab: Lab) -> None:
    run = lab.trained(SCRIPT, workers=3, protocol="ssp", device_time_s=0.002, jitter=0.5)
    again = lab.run(SCRIPT, workers=3, protocol="ssp", replay=str(run.folder))
    assert_equal(again.weights, run.weights)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "protocol", ["diloco", "dpsgd", "ds_sync", "easgd", "fedavg", "hpsgd", "osp", "selsync"]
)
def test_what_peers_mix_stays_within_them_too(lab: Lab, protocol: str) -> None:
    """Though some of them add what a worker moved by to what others have come to."""
    dials = {"settings": {"period": 2}} if protocol in ("diloco", "easgd", "fedavg") else {}
    run = lab.trained(lab.script(BOUNDED), workers=3, protocol=protocol, **dials)
    assert 0.9 * LARGEST < largest(run) <= LARGEST * (1 + 1e-12)


@pytest.fixture(scope="module")
def elsewhere(warm_lab: Lab) -> Iterator[LocalEngine]:
    """The second host's engine."""
    engine = LocalEngine()
    warm_lab.further.add(engine._process.pid)
    yield engine
    warm_lab.further.discard(engine._process.pid)
    engine.close()


@pytest.mark.some(3)
@pytest.mark.parametrize("here", [0, 1])
@pytest.mark.parametrize(
    "way", [{"protocol": "bsp"}, {"protocol": "asp"}, INCREMENTS, {"protocol": "local_sgd"}], ids=str
)
def test_between_hosts_too(
    lab: Lab, elsewhere: LocalEngine, alone: dict[str, Tensor], way: dict[str, Any], here: int
) -> None:
    apart = Apart(lab, elsewhere, SCRIPT, here=here, workers=2, **way)
    apart.host(2 - here)
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert largest(run) <= LARGEST * (1 + 1e-12)
    if way == {"protocol": "bsp"}:
        assert_close(run.weights, alone, 1e-12)


@pytest.mark.some(2)
@pytest.mark.parametrize("here", [0, 1])
@pytest.mark.parametrize(
    "way", [{"protocol": "bsp"}, {"protocol": "asp"}, {"protocol": "asp", "checkpoint_every": "3"}], ids=str
)
def test_a_store_on_several_hosts_has_it_run_on_the_whole_model(
    lab: Lab, elsewhere: LocalEngine, way: dict[str, Any], here: int
) -> None:
    """The norm of all weights is 1, though no host has all of them."""
    script = lab.script(WHOLE)
    apart = Apart(lab, elsewhere, script, here=here, workers=3, store_hosts=2, **way)
    apart.host(3 - here)
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert abs(sum(float(w.square().sum()) for w in run.weights.values()) - 1) < 1e-12
    assert run.result.samples == 96
    if way["protocol"] == "bsp":
        whole = lab.trained(script, workers=3, protocol="bsp")
        assert_close(run.weights, whole.weights, 1e-12)


PROJECTED = """
import os, signal, time, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.join()
torch.manual_seed(0)
model = nn.Linear(3, 1, bias=False).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(96, 3).double()), batch_size=4)
calls = 0

def project():
    global calls
    calls += 1
    {before}
    model.weight.div_(model.weight.norm())

{register}
model, optimizer, loader = pace.prepare(model, optimizer, loader)
{after}
for _ in pace.epochs(1):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
pace.print("calls", calls)
"""


def projected(before: str = "", register: str = "pace.after_step(project)", after: str = "") -> str:
    return PROJECTED.format(before=before, register=register, after=after)


BOUNDED = (
    projected()
    .replace("model.weight.div_(model.weight.norm())", "model.weight.clamp_(-0.01, 0.01)")
    .replace("model(x).square()", "model(x - 1)")
    .replace("calls = 0\n\n", "calls = 0\nnn.init.zeros_(model.weight)\n\n")
)
WHOLE = (
    projected()
    .replace("nn.Linear(3, 1, bias=False)", "nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))")
    .replace(
        "model.weight.div_(model.weight.norm())",
        "norm = sum(p.square().sum() for p in model.parameters()).sqrt()\n"
        "    [p.div_(norm) for p in model.parameters()]",
    )
)


@pytest.mark.some(2)
@pytest.mark.parametrize("protocol", ["asp", "bsp", "ssp"])
def test_a_worker_that_dies_in_the_middle_of_it_is_replaced_by_another(lab: Lab, protocol: str) -> None:
    """And what it was asked for is done all the same: the weights are a unit vector."""
    dies = "os.kill(os.getpid(), signal.SIGKILL) if pace.rank == 0 and calls == 3 else None"
    run = lab.run(lab.script(projected(dies)), workers=3, protocol=protocol)
    assert run.died == {0}
    assert abs(float(run.weights["weight"].norm()) - 1) < 1e-12
    assert run.result.samples >= 96


CHECKED = projected().replace(
    "        optimizer.step()\n",
    "        optimizer.step()\n        assert abs(float(model.weight.norm()) - 1) < 1e-12\n",
)


@pytest.mark.some(2)
@pytest.mark.parametrize("protocol", ["dpsgd", "easgd", "selsync"])
def test_what_a_peer_goes_on_with_is_as_the_function_leaves_it(lab: Lab, protocol: str) -> None:
    """Though means of unit vectors are shorter."""
    assert lab.trained(lab.script(CHECKED), workers=3, protocol=protocol).result.samples == 96


def test_a_look_ahead_is_as_the_function_leaves_it(lab: Lab) -> None:
    text = CHECKED.replace("lr=0.1", "lr=0.1, momentum=0.9").replace("calls)", "calls, pace._trainer.ahead)")
    run = lab.trained(lab.script(text), workers=2, protocol="asp", correct="dana")
    assert "True" in run.log()


def test_nobody_waits_for_one_who_died_while_another_ran_it(lab: Lab) -> None:
    """Rank 0 runs it when rank 1 has pushed and is killed, and then dies itself."""
    pid = lab.root / "pid"
    writes = f"open({str(pid)!r}, 'w').write(str(os.getpid())) if pace.rank == 1 else None"
    kills = f"time.sleep(1), os.kill(int(open({str(pid)!r}).read()), 9), time.sleep(1)"
    dies = f"({kills}, os.kill(os.getpid(), 9)) if pace.rank == 0 and calls == 3 else None"
    run = lab.run(lab.script(projected(f"{writes}\n    {dies}")), workers=3, protocol="asp")
    assert run.died == {0, 1}
    assert run.result.samples >= 96
    assert abs(float(run.weights["weight"].norm()) - 1) < 1e-12


def test_an_error_in_it_is_the_scripts_own(lab: Lab) -> None:
    run = lab.run(lab.script(projected("raise ValueError('no such set')")), workers=2, protocol="asp")
    assert run.result.status == "failed"
    assert "no such set" in run.logs()


@pytest.mark.parametrize("protocol", ["hybrid_sgd", "elastic_bsp", "dssp", "backup_bsp"])
def test_it_follows_every_step_that_is_made_of_held_gradients(lab: Lab, protocol: str) -> None:
    run = lab.trained(lab.script(projected()), workers=3, protocol=protocol)
    assert abs(float(run.weights["weight"].norm()) - 1) < 1e-12


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("script", "dials", "words"),
    [
        (projected(register="pace.rank or pace.after_step(project)"), {"protocol": "bsp"}, "rank 1 has not"),
        (
            projected(register="pace.rank or pace.after_step(project)"),
            {"protocol": "local_sgd"},
            "rank 1 has not",
        ),
        (
            projected(register="", after="pace.after_step(project)"),
            {"protocol": "asp"},
            "after pace.prepare()",
        ),
        (
            projected(register="pace.after_step(project, torch.optim.SGD([torch.ones(1)], lr=1.0))"),
            {"protocol": "asp"},
            "pace.prepare() was not",
        ),
        (
            projected(
                "still.fill_(calls)",
                "still = model.still = nn.Parameter(torch.zeros(1), requires_grad=False)\n"
                "pace.after_step(project)",
            ),
            {"protocol": "asp"},
            "wrote to 'still', which is not trained",
        ),
        (projected(), {"protocol": "ad_psgd"}, "added to a model that no worker has"),
        (projected(), {"protocol": "easgd", "settings": {"mode": "downpour"}}, "a model that no worker has"),
    ],
    ids=["some ranks", "some peers", "late", "another optimizer", "not trained", "cells", "centre"],
)
def test_a_mistake_with_it_is_refused(lab: Lab, script: str, dials: dict[str, Any], words: str) -> None:
    run = lab.run(lab.script(script), workers=2, **dials)
    assert run.result.status == "failed"
    assert words in run.end.detail


@pytest.mark.parametrize("keeps", ["allreduce", "local_sgd"])
def test_copies_on_a_mesh_run_it_after_their_own_steps(lab: Lab, keeps: str) -> None:
    run = lab.trained(lab.script(projected()), workers=2, mesh={"data": 2}, protocol=keeps)
    assert 0.9 < float(run.weights["weight"].norm()) < 1 + 1e-12


SPLIT = projected(
    register="from paceline.parallel.layers import parallelize\n"
    "model = parallelize(model, pace.mesh(model=2))\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "pace.after_step(project)",
).replace("nn.Linear(3, 1, bias=False)", "nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 16))")
STAGES = projected(
    register="from paceline.parallel.pipeline import pipeline\npace.after_step(project)"
).replace(
    "model, optimizer, loader = pace.prepare(model, optimizer, loader)",
    "pipeline(pace, pace.mesh(stage=2), nn.Sequential(model, nn.Tanh()), optimizer, loader, "
    "loss=nn.MSELoss())",
)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("text", "mesh", "words"),
    [
        (SPLIT, {"model": 2}, "every worker has pieces of it"),
        (STAGES, {"stage": 2}, "every worker has its own stage"),
    ],
    ids=["pieces", "stages"],
)
def test_a_model_that_nobody_has_whole_is_a_reason_to_refuse_it(
    lab: Lab, text: str, mesh: dict[str, int], words: str
) -> None:
    run = lab.run(lab.script(text), workers=2, mesh=mesh)
    assert run.result.status == "failed"
    assert words in run.end.detail


def test_under_a_plan_it_is_refused() -> None:
    pace = OsdpPace(0, 2, RunConfig(run="", folder=""), cast(Any, None))
    pace.after_step(print)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="under a plan every worker has pieces"):
        pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


PERTURBED = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(48, 3).double()), batch_size={batch})
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(1):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        steps = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
        was = [p.data.clone() for p in model.parameters()]
        with torch.no_grad():
            for p, e in zip(model.parameters(), steps):
                p.add_(e)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for p, e, before in zip(model.parameters(), steps, was):
                {back}
        optimizer.step()
"""
BACK = ["p.sub_(e)", "p.data = before", "p.copy_(before)"]


@pytest.mark.some(6)
@pytest.mark.parametrize("back", BACK)
@pytest.mark.parametrize(
    "way",
    [
        {"protocol": "bsp"},
        {"protocol": "allreduce"},
        {"protocol": "allreduce", "private_weights": True},
        {"protocol": "asp"},
        INCREMENTS,
        {"protocol": "local_sgd"},
    ],
    ids=str,
)
def test_weights_that_are_perturbed_for_a_second_gradient_are_trained(
    lab: Lab, way: dict[str, Any], back: str
) -> None:
    """Sharpness-aware minimization. One worker of each family takes the steps of plain PyTorch."""
    script = lab.script(PERTURBED.format(batch=4, back=back))
    plain = lab.trained(script, workers=1)
    assert_close(lab.trained(script, **way, **virtual(1)).weights, plain.weights, 1e-12)
    assert lab.trained(script, workers=2, **way).result.samples == 48
