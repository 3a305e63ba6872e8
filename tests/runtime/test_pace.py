"""What prepare does to the user's own objects, where no run is needed to see it."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler

from paceline.errors import ConfigError
from paceline.runtime.lone.recorded import RecordedSolo
from paceline.runtime.lone.solo import Solo
from paceline.runtime.peer.worker import PeerWorker
from paceline.runtime.worker.optimizer.schedules import follow
from paceline.runtime.worker.optimizer.store_state import Elsewhere
from paceline.runtime.worker.pace import Pace
from paceline.runtime.worker.paced import PacedWorker
from paceline.runtime.worker.worker import Worker
from paceline.store.optimizers import check_suited


def adam() -> torch.optim.Adam:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=1.0)


def schedulers() -> list[lr_scheduler.LRScheduler]:
    made = adam()
    warm = lr_scheduler.LinearLR(made, 0.1, total_iters=2)
    return [
        lr_scheduler.LambdaLR(adam(), lambda step: 1 / (1 + step)),
        lr_scheduler.OneCycleLR(adam(), 1.0, total_steps=10),
        lr_scheduler.CosineAnnealingLR(adam(), 10),
        lr_scheduler.SequentialLR(made, [warm, lr_scheduler.ExponentialLR(made, 0.9)], [2]),
    ]


@pytest.mark.parametrize("at", range(4))
@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:The epoch parameter")
def test_a_prepared_scheduler_can_be_saved_and_loaded_as_an_ordinary_one(at: int) -> None:
    prepared, plain = schedulers()[at], schedulers()[at]
    follow(prepared, lambda: 3)
    prepared.step()
    for _ in range(3):
        plain.step()
    file = io.BytesIO()
    torch.save(prepared.state_dict(), file)
    file.seek(0)
    fresh = schedulers()[at]
    fresh.load_state_dict(torch.load(file, weights_only=False))
    assert prepared.state_dict().keys() == plain.state_dict().keys()
    assert fresh.get_last_lr() == prepared.get_last_lr() == plain.get_last_lr()
    assert isinstance(prepared, type(plain))


def test_state_that_nobody_would_use_is_refused_and_settings_are_loaded() -> None:
    kept, optimizer = adam(), adam()
    link = SimpleNamespace(reaches_state=False, rank=0, lead=True)
    elsewhere = Elsewhere(optimizer, {}, link, print)  # type: ignore[arg-type]
    optimizer.load_state_dict(kept.state_dict())
    optimizer.state.clear()
    kept.param_groups[0]["params"][0].grad = torch.ones(2)
    kept.step()
    with pytest.raises(ConfigError, match="--resume"):
        optimizer.load_state_dict(kept.state_dict())
    elsewhere.steps()
    with pytest.raises(ConfigError, match="--resume"):
        optimizer.state.clear()
    with pytest.raises(ConfigError, match="--resume"):
        optimizer.load_state_dict(adam().state_dict())


def test_an_optimizer_whose_state_is_elsewhere_says_so_to_whom_looks_or_writes() -> None:
    optimizer, said = adam(), list[str]()
    Elsewhere(optimizer, {}, SimpleNamespace(reaches_state=True, rank=1, lead=False), said.append)  # type: ignore[arg-type]
    assert not list(optimizer.state.values())
    assert "optimizer.state_dict()" in said[0]
    with pytest.raises(ConfigError, match="the script writes to"):
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {}
    assert not copy.deepcopy(optimizer).state


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_that_cannot_step_with_a_flat_gradient_is_refused(kind: type) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__} cannot run on several workers"):
        check_suited(kind([torch.nn.Parameter(torch.ones(2))]))


def test_a_parameter_of_two_optimizers_is_refused_with_what_to_do() -> None:
    model = torch.nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ConfigError, match="optimizers 0 and 1 share a parameter"):
        Solo().prepare(model, *optimizers)


def test_a_model_without_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one optimizer"):
        Solo().prepare(torch.nn.Linear(1, 1))


def test_no_kind_of_worker_derives_from_another() -> None:
    assert {kind.__bases__ for kind in (Solo, RecordedSolo, Worker)} == {(Pace,)}
    assert {kind.__bases__ for kind in (PacedWorker, PeerWorker)} == {(Worker,)}
