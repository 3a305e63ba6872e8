"""`pace.consensus()`: how far apart replicas are, whoever asks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from e2e.scripts.cases import CASES
from paceline.protocols import PEERS
from paceline.trace.events import Evaluated, Reported
from support.runs import SCRIPTS, Lab, Run
from support.tensors import assert_equal

ALONE: dict[str, Any] = {"protocol": "local_sgd", "settings": {"period": 1000}}


FABRICS = ["shared", "gloo"]
EVERYWHERE = [(name, fabric) for name in sorted(PEERS) for fabric in FABRICS]
RUNS = [(name, fabric) for name, fabric in EVERYWHERE if fabric == "shared" or not PEERS[name]().free]


def told(run: Run) -> dict[int, list[float]]:
    """What each rank printed."""
    said: dict[int, list[float]] = {}
    for rank, value in re.findall(r"^rank (\d+) (\S+)$", run.logs(), re.M):
        said.setdefault(int(rank), []).append(float(value))
    return said


def distance(workers: int, epochs: int, period: int) -> float:
    """Of replicas that are trained here, and averaged every so many iterations."""
    case = CASES["momentum"]
    built = [case.build() for _ in range(workers)]
    x, y = case.samples(48)
    firsts = [first for _ in range(epochs) for first in range(0, 48, 4)]
    for step in range(len(firsts) // workers):
        for (model, optimizer), first in zip(built, firsts[step * workers :], strict=False):
            case.iteration(model, optimizer, x[first : first + 4], y[first : first + 4])
        if (step + 1) % period == 0:
            mean = torch.stack([parameters_to_vector(model.parameters()) for model, _ in built]).mean(0)
            for model, _ in built:
                vector_to_parameters(mean.detach().clone(), model.parameters())
    replicas = torch.stack([parameters_to_vector(model.parameters()).detach() for model, _ in built])
    return float((replicas - replicas.mean(0)).square().sum(1).mean().sqrt())


@pytest.mark.parametrize("fabric", FABRICS)
def test_it_is_the_root_of_the_mean_square_distance_from_the_mean(lab: Lab, fabric: str) -> None:
    """The last to ask does so when all have done their last iteration."""
    dials: dict[str, Any] = {"protocol": "local_sgd", "settings": {"period": 5}, "fabric": fabric}
    run = lab.trained("apart.py", "momentum", workers=3, **dials)
    said = told(run)
    assert {rank: len(values) for rank, values in said.items()} == {0: 3, 1: 3, 2: 3}
    reported = [event.values["consensus_distance"] for event in run.of(Reported)]
    assert sorted(reported) == sorted(value for values in said.values() for value in values)
    assert reported[-1] == pytest.approx(distance(3, 3, 5), rel=1e-9)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("who", [(0,), (1,), (2,), (1, 2)])
def test_any_rank_may_ask_alone_and_nothing_is_disturbed(lab: Lab, who: tuple[int, ...], fabric: str) -> None:
    dials: dict[str, Any] = {"protocol": "local_sgd", "settings": {"period": 5}, "fabric": fabric}
    dials["workers"] = 3
    run = lab.trained("apart.py", "momentum", "--ask", *who, **dials)
    said = told(run)
    assert {rank: len(values) for rank, values in said.items()} == dict.fromkeys(who, 3)
    assert all(value > 0 for values in said.values() for value in values)
    plain = lab.trained("peers.py", "momentum", "--evaluate", "none", **dials)
    assert_equal(run.weights, plain.weights)


@pytest.mark.parametrize(("protocol", "fabric"), RUNS)
def test_all_may_ask_while_the_lead_evaluates_under_every_protocol(
    lab: Lab, protocol: str, fabric: str
) -> None:
    run = lab.trained("apart.py", "momentum", "--evaluate", workers=3, protocol=protocol, fabric=fabric)
    assert {rank: len(values) for rank, values in told(run).items()} == {0: 3, 1: 3, 2: 3}
    assert len(run.of(Evaluated)) == 3
    if protocol == "allreduce":
        assert max(value for values in told(run).values() for value in values) < 1e-12


@pytest.mark.parametrize(("workers", "protocol"), [(1, "allreduce"), (1, "bsp"), (2, "bsp"), (2, "asp")])
def test_where_there_is_one_model_it_is_zero(lab: Lab, workers: int, protocol: str) -> None:
    run = lab.trained("apart.py", "momentum", workers=workers, protocol=protocol)
    assert told(run) == {rank: [0.0] * 3 for rank in range(workers)}


@pytest.mark.parametrize("protocol", ["bsp", "allreduce"])
def test_before_prepare_it_is_a_mistake(lab: Lab, protocol: str) -> None:
    run = lab.run("apart.py", "momentum", "--early", workers=2, protocol=protocol)
    assert run.end.user_mistake
    assert "pace.consensus() was called before pace.prepare()" in run.end.detail


def test_after_leave_it_says_so(lab: Lab) -> None:
    run = lab.run("apart.py", "momentum", "--late", workers=2, **ALONE)
    assert "pace.consensus() after pace.leave()" in run.logs()


def test_whoever_asks_and_dies_holds_nobody_up(lab: Lab) -> None:
    dials: dict[str, Any] = {"workers": 3, "device_time_s": 0.002, **ALONE}
    script = lab.script(
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "import paceline\n"
        "from paceline.runtime.messages.workers import Away\n"
        "from cases import CASES\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "pace = paceline.join()\n"
        "case = CASES['momentum']\n"
        "model, optimizer = case.build()\n"
        "loader = DataLoader(TensorDataset(*case.samples(240)), batch_size=4)\n"
        "model, optimizer, loader = pace.prepare(model, optimizer, loader)\n"
        "for step, (x, y) in enumerate(loader):\n"
        "    if pace.rank == 2 and step == 5:\n"
        "        pace._link._send(Away(distance=True))\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    case.iteration(model, optimizer, x, y)\n"
    )
    run = lab.trained(script, **dials)
    assert run.died == {2}


@pytest.mark.parametrize("fabric", FABRICS)
def test_all_who_ask_at_once_hear_the_same(lab: Lab, fabric: str) -> None:
    """In lockstep everybody asks after the same iteration, before anybody goes on."""
    dials: dict[str, Any] = {"protocol": "dpsgd", "settings": {"topology": "ring"}, "fabric": fabric}
    run = lab.trained("apart.py", "momentum", workers=3, **dials)
    first, *others = told(run).values()
    assert first[0] > 0
    assert all(other == first for other in others)
