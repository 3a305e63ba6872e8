"""All stages of a pipeline in one process, one after another: real workers' numbers, without their time.

Stages talk through first-in-first-out queues alone, so whose turn it is changes no number. For measurements
of how many samples a pipeline needs, which a busy machine must not disturb.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import RunError
from paceline.parallel.pipeline import engine as e
from paceline.parallel.pipeline.blocks import stage_of
from paceline.parallel.pipeline.computing import Computing, Loss, ahead_of

Tokens = deque[tuple[int | None, Tensor | None]]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class _Place:
    """One stage, and what lies before it."""

    def __init__(self, stage: e.Stage, computing: Computing, optimizer: torch.optim.Optimizer) -> None:
        self.stage, self.computing, self.optimizer = stage, computing, optimizer
        self.activations: Tokens = deque()
        self.gradients: Tokens = deque()
        self.input: Tensor | None = None
        self.output: Tensor | None = None
        self.gradient: Tensor | None = None
        self.steps: e.Steps | None = None
        self.wants: e.Operation | None = None

    def resume(self, answer: Any = None) -> None:
        """Find out what it does next."""
        assert self.steps is not None
        try:
            self.wants = self.steps.send(answer)
        except StopIteration:
            self.steps = self.wants = None


class InTurn:
    """A pipeline. The blocks are trained in place."""

    def __init__(
        self,
        schedule: e.Schedule,
        blocks: nn.Sequential,
        cuts: Sequence[int],
        loss: Loss,
        optimizer: MakeOptimizer,
    ) -> None:
        self._schedule, self._blocks = schedule, blocks
        self._labels: dict[int, Tensor] = {}
        self._batch: Tensor | None = None
        self._fed = 0
        last = schedule.delays.stages - 1
        self._places = []
        for stage in range(last + 1):
            row = stage_of(blocks, cuts, stage)
            made = optimizer(list(row.parameters()))
            computing = Computing(row, stage == 0, loss if stage == last else None, made)
            computing.ahead = ahead_of(schedule, stage, made)
            self._places.append(_Place(e.Stage(schedule, stage), computing, made))

    def step(self, x: Tensor, y: Tensor) -> None:
        """One iteration of all stages: a batch enters at the first."""
        self._batch, self._labels[self._fed] = x, y
        self._fed += 1
        self._iterate(feed=True)

    def settle(self) -> None:
        """Bring to an end what is under way."""
        for _ in range(self._schedule.delays.drain):
            self._iterate(feed=False)
        self._run([place.stage.finish() for place in self._places])

    def _iterate(self, feed: bool) -> None:
        self._run([place.stage.iteration(feed) for place in self._places])

    def _run(self, steps: list[e.Steps]) -> None:
        for place, each in zip(self._places, steps, strict=True):
            place.steps = each
            place.resume()
        while going := [place for place in self._places if place.steps is not None]:
            moved = [self._advance(place) for place in going]
            if not any(moved):
                raise RunError("all stages wait for each other: this pipeline cannot go on.")

    def _advance(self, place: _Place) -> bool:
        """As far as its tokens go; whether it moved."""
        moved = False
        while place.wants is not None and self._can(place):
            place.resume(self._carry_out(place, place.wants))
            moved = True
        return moved

    @staticmethod
    def _can(place: _Place) -> bool:
        if isinstance(place.wants, e.TakeActivation):
            return bool(place.activations)
        return bool(place.gradients) if isinstance(place.wants, e.TakeGradient) else True

    def _carry_out(self, place: _Place, operation: e.Operation) -> int | None:
        number, computing = place.stage.stage, place.computing
        match operation:
            case e.TakeBatch():
                place.input = self._batch
            case e.TakeActivation():
                token, place.input = place.activations.popleft()
                return token
            case e.TakeGradient():
                token, place.gradient = place.gradients.popleft()
                return token
            case e.SendActivation():
                self._places[number + 1].activations.append((operation.token, place.output))
            case e.SendGradient():
                self._places[number - 1].gradients.append((operation.token, place.gradient))
            case e.Forward():
                labels = self._labels.pop(operation.index) if place.stage.last else None
                assert place.input is not None
                place.output = computing.forward(operation, place.input, labels)
            case e.Backward():
                place.gradient = computing.backward(operation, None if place.stage.last else place.gradient)
            case e.Update():
                _update(place, len(operation.batches))
        return None


def _update(place: _Place, batches: int) -> None:
    place.computing.average(batches)
    place.optimizer.step()
    place.optimizer.zero_grad()
