"""Pipelines in one process, for tests: the engine's own stages, driven in any order that their tokens allow.

    trained = train(Schedule(Delays((1, 1, 0), (4, 2, 0))), blocks(), batches(12))
    assert trained.updates == [12, 12, 12]

Whose turn it is is drawn at random: what comes out may not depend on it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.pipeline import engine as e
from paceline.parallel.pipeline.blocks import stage_of
from paceline.parallel.pipeline.computing import Computing, ahead_of

Batches = Sequence[tuple[Tensor, Tensor]]


def blocks(stages: int = 3, seed: int = 0, extra: bool = False) -> nn.Sequential:
    """A row of small blocks, one for each stage; with `extra` with batch norm and dropout."""
    torch.manual_seed(seed)
    rows: list[nn.Module] = []
    for stage in range(stages):
        out = 3 if stage == stages - 1 else 5
        layers = [nn.Linear(5, out), nn.Tanh()]
        rows.append(nn.Sequential(*layers, *([nn.BatchNorm1d(out), nn.Dropout(0.3)] if extra else [])))
    return nn.Sequential(*rows)


def batches(count: int, seed: int = 1, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 5, generator=draw), torch.randint(0, 3, (size,), generator=draw))
        for _ in range(count)
    ]


def blanks(count: int) -> list[Any]:
    """Batches of nothing, for runs that only count."""
    return [(None, None)] * count


@dataclass
class Trained:
    """What came of it."""

    model: nn.Sequential
    gradients: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    """By stage and batch."""
    staleness: dict[int, list[int]] = field(default_factory=dict)
    """By stage: updates between forward and backward of every batch."""
    updates: list[int] = field(default_factory=list)
    first_update: list[int] = field(default_factory=list)
    """By stage: the iteration of its first update."""
    longest: list[int] = field(default_factory=list)
    """By stage: the most batches that waited for a gradient."""
    weights: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    """By stage and batch: at which the batch was forwarded."""

    @property
    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()


class _Actor:
    def __init__(self, stage: e.Stage, computing: Computing | None, optimizer: Any) -> None:
        self.stage, self.computing, self.optimizer = stage, computing, optimizer
        self.tokens: dict[str, deque[Any]] = {"activations": deque(), "gradients": deque()}
        self.steps: e.Steps | None = None
        self.wants: e.Operation | None = None
        self.input: Any = None
        self.output: Any = None
        self.gradient: Any = None
        self.activations_sent = self.gradients_sent = 0


class Driver:
    """Lets stages move, one at a time, in a random order; checks the queues' bounds on the way."""

    def __init__(
        self,
        schedule: e.Schedule,
        model: nn.Sequential | None,
        data: Batches,
        *,
        lr: float = 0.1,
        momentum: float = 0.9,
        seed: int = 0,
    ) -> None:
        self.schedule, self.data, self.random = schedule, data, random.Random(seed)
        stages = schedule.delays.stages
        self.trained = Trained(deepcopy(model) if model is not None else nn.Sequential())
        self.trained.longest = [0] * stages
        self.trained.first_update = [-1] * stages
        self.trained.staleness = {stage: [] for stage in range(stages)}
        self.total = len(data) + schedule.delays.drain
        self.actors = [self._actor(stage, stages, model is not None, lr, momentum) for stage in range(stages)]

    def _actor(self, stage: int, stages: int, real: bool, lr: float, momentum: float) -> _Actor:
        engine = e.Stage(self.schedule, stage)
        if not real:
            return _Actor(engine, None, None)
        row = stage_of(self.trained.model, list(range(1, stages)), stage)
        optimizer = torch.optim.SGD(row.parameters(), lr=lr, momentum=momentum)
        loss = F.cross_entropy if stage == stages - 1 else None
        computing = Computing(row, stage == 0, loss, optimizer)
        computing.ahead = ahead_of(self.schedule, stage, optimizer)
        return _Actor(engine, computing, optimizer)

    def run(self) -> Trained:
        left = list(self.actors)
        while left:
            ready = [actor for actor in left if self._can_move(actor)]
            assert ready, "all stages wait for each other"
            actor = self.random.choice(ready)
            self._move(actor)
            self._check_slack()
            if actor.steps is None and actor.stage.iterations == self.total and actor.stage.drained:
                left.remove(actor)
        self.trained.updates = [actor.stage.updates for actor in self.actors]
        return self.trained

    def _can_move(self, actor: _Actor) -> bool:
        if isinstance(actor.wants, e.TakeActivation):
            return bool(actor.tokens["activations"])
        if isinstance(actor.wants, e.TakeGradient):
            return bool(actor.tokens["gradients"])
        return True

    def _move(self, actor: _Actor) -> None:
        if actor.steps is None:
            if actor.stage.iterations < self.total:
                actor.steps = actor.stage.iteration(actor.stage.iterations < len(self.data))
            else:
                actor.steps = actor.stage.finish()
            answer = None
        else:
            assert actor.wants is not None
            answer = self._carry_out(actor, actor.wants)
        try:
            actor.wants = actor.steps.send(answer)
        except StopIteration:
            actor.steps = actor.wants = None
            assert len(actor.stage.waiting) <= actor.stage.delay

    def _carry_out(self, actor: _Actor, operation: e.Operation) -> Any:
        number = actor.stage.stage
        match operation:
            case e.TakeBatch():
                actor.input = self.data[operation.index][0]
            case e.TakeActivation():
                token, actor.input = actor.tokens["activations"].popleft()
                return token
            case e.TakeGradient():
                token, actor.gradient = actor.tokens["gradients"].popleft()
                return token
            case e.SendActivation():
                actor.activations_sent += 1
                self.actors[number + 1].tokens["activations"].append((operation.token, actor.output))
            case e.SendGradient():
                actor.gradients_sent += 1
                self.actors[number - 1].tokens["gradients"].append((operation.token, actor.gradient))
            case e.Forward():
                self._forward(actor, operation)
            case e.Backward():
                self._backward(actor, operation)
            case e.Update():
                self._update(actor, operation)
        return None

    def _forward(self, actor: _Actor, operation: e.Forward) -> None:
        stage = actor.stage
        self.trained.longest[stage.stage] = max(self.trained.longest[stage.stage], len(stage.waiting))
        if actor.computing is not None:
            at = {name: p.detach().clone() for name, p in actor.computing.row.named_parameters()}
            self.trained.weights[stage.stage, operation.index] = at
            labels = self.data[operation.index][1]
            actor.output = actor.computing.forward(operation, actor.input, labels)

    def _backward(self, actor: _Actor, operation: e.Backward) -> None:
        stage = actor.stage
        self.trained.staleness[stage.stage].append(stage.staleness)
        if actor.computing is not None:
            gradient = None if stage.last else actor.gradient
            actor.gradient = actor.computing.backward(operation, gradient)
            named = actor.computing.row.named_parameters()
            self.trained.gradients[stage.stage, operation.index] = {
                name: p.grad.clone() for name, p in named if p.grad is not None
            }

    def _update(self, actor: _Actor, operation: e.Update) -> None:
        number = actor.stage.stage
        if self.trained.first_update[number] < 0:
            self.trained.first_update[number] = actor.stage.iterations - 1
        if actor.optimizer is None:
            return
        actor.computing.average(len(operation.batches))
        actor.optimizer.step()
        actor.optimizer.zero_grad()

    def _check_slack(self) -> None:
        """Nobody is further ahead of the stage behind than the queue between them allows."""
        for before, after in zip(self.actors, self.actors[1:], strict=False):
            p, q = (getattr(self.schedule.delays, name)[before.stage.stage] for name in ("p", "q"))
            done = [a.stage.iterations - (a.steps is not None) for a in (before, after)]
            assert done[0] - after.gradients_sent <= q
            assert done[1] - before.activations_sent <= p


def train(schedule: e.Schedule, model: nn.Sequential | None, data: Batches, **more: Any) -> Trained:
    """Train a copy of the model."""
    return Driver(schedule, model, data, **more).run()


def plain(model: nn.Sequential, data: Batches, lr: float = 0.1, momentum: float = 0.9) -> Trained:
    """The same by ordinary back-propagation, in one process."""
    trained = Trained(deepcopy(model))
    optimizer = torch.optim.SGD(trained.model.parameters(), lr=lr, momentum=momentum)
    for index, (x, y) in enumerate(data):
        optimizer.zero_grad()
        F.cross_entropy(trained.model(x), y).backward()
        for stage, (name, block) in enumerate(trained.model.named_children()):
            trained.gradients[stage, index] = {
                f"{name}.{own}": p.grad.clone() for own, p in block.named_parameters() if p.grad is not None
            }
        optimizer.step()
    return trained
