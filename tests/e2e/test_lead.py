"""Who prints and evaluates once rank 0 is gone; and of which moment a figure is that stands in the result."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.config import RunConfig
from paceline.engines.control import Guest
from paceline.engines.hosting import enrol
from paceline.engines.local import LocalEngine
from paceline.sim.request import ClusterRequest
from paceline.trace.events import Evaluated, LeadPassed, WorkerJoined
from support.command import run_command
from support.hosts import SECRET, Apart
from support.runs import SCRIPTS, Lab, Run, wait_until
from support.tensors import assert_equal

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("easgd", {"protocol": "easgd"}),
    ("asp", {"protocol": "asp"}),
    ("bsp", {"protocol": "bsp"}),
    ("local_sgd", {"protocol": "local_sgd"}),
    ("increments", {"protocol": "asp", "apply": "increments"}),
]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def elsewhere(warm_lab: Lab) -> Iterator[LocalEngine]:
    """The second host's engine."""
    engine = LocalEngine()
    warm_lab.further.add(engine._process.pid)
    yield engine
    warm_lab.further.discard(engine._process.pid)
    engine.close()


def evaluated(run: Run) -> list[tuple[int, float]]:
    """Who evaluated, and what."""
    assert run.result.status == "finished", f"{run.end.detail}\n{run.logs()}"
    return [(event.worker, event.values["accuracy"]) for event in run.of(Evaluated)]


def followed(first: int, *heirs: int) -> list[tuple[int, float]]:
    """One evaluation per epoch, by these ranks in turn."""
    return [(rank, 0.1 * (epoch + 1)) for epoch, rank in enumerate((first, *heirs))]


def assert_followed(run: Run, first: int, heir: int) -> None:
    """Who dies in the second epoch has evaluated the first, and the heir the rest, as far as it came after
    that: outside of lockstep it may be an epoch behind or ahead by then."""
    (rank, accuracy), *rest = evaluated(run)
    assert (rank, accuracy) == (first, pytest.approx(0.1))
    assert {rank for rank, _ in rest} == {heir}
    assert [accuracy for _, accuracy in rest] == sorted({accuracy for _, accuracy in rest})
    assert rest[-1][1] == pytest.approx(0.4)


@pytest.mark.parametrize("how", ["all", "lead"])
@pytest.mark.parametrize("dials", [dials for _, dials in FAMILIES], ids=[name for name, _ in FAMILIES])
def test_the_next_rank_evaluates_and_prints_when_rank_0_is_killed(
    lab: Lab, dials: dict[str, Any], how: str
) -> None:
    run = lab.run("leads.py", how, "--dies", 0, 1, workers=3, device_time_s=0.002, **dials)
    assert_followed(run, 0, 1)
    assert run.died == {0}
    assert [event.worker for event in run.of(LeadPassed)] == [1]
    assert "epoch 3: rank 1 has" in run.log("rank1")
    assert "epoch" not in run.log("rank2")
    at = run.result.accuracy_at
    assert at is not None
    assert (at.worker, at.samples) == (1, run.result.samples)


@pytest.mark.parametrize("protocol", ["easgd", "bsp", "local_sgd", "asp"])
def test_the_next_rank_evaluates_when_rank_0_is_killed_while_it_evaluates(lab: Lab, protocol: str) -> None:
    run = lab.run("leads.py", "all", "--falls", 1, workers=3, protocol=protocol, device_time_s=0.002)
    assert_followed(run, 0, 1)
    assert run.died == {0}


def test_duties_pass_on_again_and_from_who_leaves_early_but_not_at_the_end_of_all_work(lab: Lab) -> None:
    asked = ("leads.py", "lead", "--dies", 0, 1, "--leaves", 1, 1)
    run = lab.run(*asked, workers=3, protocol="bsp")
    assert evaluated(run) == followed(0, 1, 2, 2)
    whole = lab.run("leads.py", "all", workers=3, protocol="asp", device_time_s=0.002, slow={2: 3.0})
    assert evaluated(whole) == followed(0, 0, 0, 0)
    assert not whole.of(LeadPassed)


LEFT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

class Signed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("signed", torch.zeros(()))

    def forward(self, x):
        self.signed.fill_(pace.rank + 1)
        return self.linear(x)

pace = paceline.join()
model = Signed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(48, 2)), batch_size=2)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(3):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if pace.rank == 0:
        break
    pace.evaluate(lambda: float(model.signed))
"""


@pytest.mark.parametrize("protocol", ["asp", "bsp"])
def test_the_saved_buffers_are_those_of_the_last_evaluation_though_an_earlier_lead_has_left(
    lab: Lab, protocol: str
) -> None:
    run = lab.run(lab.script(LEFT), workers=2, protocol=protocol, device_time_s=0.002)
    assert run.result.status == "finished", f"{run.end.detail}\n{run.logs()}"
    assert run.result.accuracy == 2
    assert float(run.weights["signed"]) == 2


def test_a_figure_that_is_not_of_the_end_says_of_which_moment_it_is(tmp_path: Path) -> None:
    asked = (SCRIPTS / "leads.py", "--", "first", "--dies", "0", "1")
    command = run_command("train", "-p", "bsp", "--workers", 3, *asked, cwd=tmp_path)
    assert command.returncode == 0, command.stderr
    result = msgspec.json.decode((tmp_path / "runs" / "latest" / "result.json").read_bytes())
    assert result["accuracy"] == pytest.approx(0.1)
    assert (result["accuracy_at"]["samples"], result["samples"]) == (60, 240)
    assert result["accuracy_at"]["worker"] == 0
    said = command.stdout + command.stderr
    assert "10.0 % at sample 60 of 240: not evaluated after rank 0 was lost" in said


def test_the_terminal_shows_what_the_next_rank_prints(tmp_path: Path) -> None:
    asked = (SCRIPTS / "leads.py", "--", "all", "--dies", "0", "1")
    command = run_command("train", "-p", "asp", "--workers", 3, *asked, cwd=tmp_path)
    said = command.stdout + command.stderr
    assert said.count("epoch 0: rank 0 has") == 1
    assert said.count("epoch 3: rank 1 has") == 1
    assert "accuracy   40.0 %\n" in "\n".join(line.rstrip() for line in said.splitlines()) + "\n"


@pytest.mark.parametrize("protocol", ["asp", "bsp", "easgd"])
def test_virtual_time_and_replay_pass_the_lead_on_at_the_same_place(
    lab: Lab, tmp_path: Path, protocol: str
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        "workers = 3\n[compute]\nkind = 'lognormal'\nmean_s = 0.02\nspread = 0.3\n"
        "[[event]]\nat_s = 0.25\nkill = 0\n"
    )
    request = msgspec.to_builtins(ClusterRequest(file=str(cluster)), str_keys=True)
    dials = {"workers": 3, "protocol": protocol}
    one, other = (lab.run("leads.py", "all", cluster=request, **dials) for _ in range(2))
    assert evaluated(one) == evaluated(other)
    assert {rank for rank, _ in evaluated(one)} == {0, 1}
    assert_equal(one.weights, other.weights)
    real = lab.run("leads.py", "all", "--dies", 0, 1, device_time_s=0.002, **dials)
    again = lab.run("leads.py", "all", replay=str(real.folder), **dials)
    assert_followed(real, 0, 1)
    assert evaluated(again) == evaluated(real)
    assert again.of(LeadPassed)[0].epoch == real.of(LeadPassed)[0].epoch
    assert_equal(again.weights, real.weights)


@pytest.mark.parametrize("protocol", ["asp", "easgd"])
def test_the_lead_passes_to_another_host(lab: Lab, elsewhere: LocalEngine, protocol: str) -> None:
    asked = ("leads.py", "all", "--dies", 0, 1)
    apart = Apart(lab, elsewhere, *asked, here=1, workers=3, protocol=protocol, device_time_s=0.002)
    apart.host(2)
    run = apart.finish()
    assert_followed(run, 0, 1)
    assert "epoch 3: rank 1 has" in (apart.logs / "rank1.log").read_text()


def test_a_run_of_one_rank_has_a_lead_and_passes_nothing_on(lab: Lab) -> None:
    run = lab.run("leads.py", "all", workers=1)
    assert evaluated(run) == followed(0, 0, 0, 0)


def test_a_rank_0_that_comes_back_does_not_lead_beside_its_heir(lab: Lab, elsewhere: LocalEngine) -> None:
    asked = ("leads.py", "lead", "--epochs", 100_000)
    apart = Apart(lab, elsewhere, *asked, here=0, workers=2, protocol="asp")
    apart.host(1)
    killed = apart.relay_pid, *apart.pids.values()
    with LocalEngine() as third:
        lab.further.add(third._process.pid)
        where = "{}:{}".format(*apart.address)
        third.launch(*joined(lab, where))
        apart.running.until_pushes(9)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert elsewhere.wait(30) is not None
        wait_until(lambda: apart.running.events(LeadPassed) > 0, "the next rank leads")
        apart.host(1)
        wait_until(lambda: apart.running.events(WorkerJoined) > 2, "rank 0 is back")
        seen = apart.running.events(Evaluated)
        wait_until(lambda: apart.running.events(Evaluated) > seen + 4, "somebody evaluates")
        apart.running.stop()
        run = apart.finish()
        assert third.wait(30) is not None
        lab.further.discard(third._process.pid)
    heirs = [event.worker for event in run.of(Evaluated)]
    assert heirs == sorted(heirs)
    assert heirs[-1] == 1
    assert [event.worker for event in run.of(LeadPassed)] == [1]


def joined(lab: Lab, where: str) -> tuple[RunConfig, str, Guest]:
    """What a third host is to start."""
    config, guest = enrol(where, SECRET, 1, lab.root / "third", 30)
    return config, SECRET, guest
