"""Peers that exchange without waiting for each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from e2e.scripts.cases import CASES
from paceline.trace.events import Decided, Evaluated, Exchanged
from support.driven import BATCH, EPOCHS, SAMPLES, SIZES
from support.runs import Lab, once
from support.tensors import assert_close


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_ad_psgd_loses_no_step_and_lets_the_fast_do_more(lab: Lab, topology: str) -> None:
    """Averaging pairs keeps the sum: the mean has moved by the mean of all gradients, to rounding."""
    dials: dict[str, Any] = {"device_time_s": 0.003, "slow": {0: 6.0}, "settings": {"topology": topology}}
    args = ("exact", *SIZES, *lab.pause(2, only=0))  # until the others have done half of the work
    running = lab.start("train.py", *args, workers=3, protocol="ad_psgd", **dials)
    lab.until_paused(1)
    running.until_pushes(EPOCHS * SAMPLES // BATCH // 2)
    lab.go_on()
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    torch.testing.assert_close(run.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0) / 3)
    assert run.used() == once(EPOCHS, SAMPLES)
    done = [sum(push.pushed == rank for push in run.pushes) for rank in range(3)]
    assert done[0] < max(done[1:]), "in lockstep all would do as many"
    assert run.result.waiting_share == pytest.approx([0, 0, 0], abs=0.05)


@pytest.mark.parametrize("overlap", [True, False])
def test_ad_psgd_averages_while_it_computes(lab: Lab, overlap: bool) -> None:
    """When a worker comes with its n-th gradient, n exchanges of earlier steps were carried out before; one
    after the other, that of its own step comes with it."""
    settings = {"overlap": overlap}
    run = lab.trained("train.py", "exact", *SIZES, workers=3, protocol="ad_psgd", settings=settings)
    pushed, exchanged = Counter[int](), Counter[int]()
    for event in run.trace:
        if isinstance(event, Exchanged):
            exchanged[event.workers[0]] += 1
        elif isinstance(event, Decided) and event.pushed is not None:
            before = pushed[event.pushed]
            pushed[event.pushed] += 1
            assert exchanged[event.pushed] == (before if overlap and before else before + 1)
    assert exchanged == pushed
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    torch.testing.assert_close(run.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0) / 3)


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
