"""One stage of one copy: carries out what the engine's object says, with tensors, between real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.parallel import messages as m
from paceline.parallel.along import Along, as_one
from paceline.parallel.loading import MeshLoader
from paceline.parallel.mesh import Mesh
from paceline.parallel.pace import MeshPace
from paceline.parallel.padding import Padding
from paceline.parallel.parts import CheckpointPart, export_optimizer
from paceline.parallel.pipeline import engine as e
from paceline.parallel.pipeline.computing import Computing
from paceline.parallel.pipeline.evaluating import Lead, serve
from paceline.parallel.pipeline.ways import Receiver, Sender, Way
from paceline.parallel.rates import Deferred

FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of an emulated device's time for a batch."""


class Pipeline:
    """A worker's stage of the pipeline."""

    def __init__(
        self,
        pace: MeshPace,
        mesh: Mesh,
        schedule: e.Schedule,
        computing: Computing,
        along: Along,
        loader: MeshLoader,
        optimizer: torch.optim.Optimizer,
        rates: Deferred,
        protocol: str,
    ) -> None:
        self._pace, self._mesh, self._schedule = pace, mesh, schedule
        self._computing, self._along, self._loader = computing, along, loader
        self._optimizer, self._rates, self._protocol = optimizer, rates, protocol
        index, stages = mesh.index("stage"), mesh.size("stage")
        self._stage = e.Stage(schedule, index)
        self._config: RunConfig = pace.config
        self._padding = Padding(self._config, pace.rank)
        self._connect(mesh.ranks("stage"), index, stages)
        self._batch: tuple[Any, Any] = (None, None)
        self._labels: dict[int, Tensor] = {}
        self._sizes: dict[int, int] = {}
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._gradient: Tensor | None = None
        self._samples = self._updates = self._counted = 0
        self._busy_s = 0.0
        self._position = (0, 0)
        """Epochs and rounds that went in."""
        self._under_way = False
        pace.attach(self)

    def resume(self, state: m.MeshState) -> None:
        """Begin where a checkpoint was taken: with nothing under way."""
        rounds, left = divmod(state.batches, self._mesh.size("data"))
        if left or state.mesh.get("data", 1) != self._mesh.size("data"):
            raise ConfigError(
                f"the checkpoint is of {state.mesh.get('data', 1)} copies, the mesh has "
                f"{self._mesh.size('data')}. Resume with as many; the number of stages may differ."
            )
        self._updates, self._samples = state.updates, state.samples
        self._position = (state.passes, rounds)
        self._loader.resume(*self._position)
        self._rates.catch_up(state.schedule_steps)

    def _connect(self, row: tuple[int, ...], index: int, stages: int) -> None:
        """Ways to the neighbours, and from the first stage to the last."""
        delays, last = self._schedule.delays, index == stages - 1
        self._senders: dict[Way, Sender] = {}
        self._receivers: dict[Way, Receiver] = {}
        if not last:
            room = delays.p[index] + delays.q[index] + 1
            self._senders[Way.ACTIVATIONS] = Sender(Way.ACTIVATIONS, row[index + 1], room)
            self._receivers[Way.GRADIENTS] = Receiver(Way.GRADIENTS, row[index + 1])
        if index:
            room = delays.p[index - 1] + delays.q[index - 1] + 1
            self._senders[Way.GRADIENTS] = Sender(Way.GRADIENTS, row[index - 1], room)
            self._receivers[Way.ACTIVATIONS] = Receiver(Way.ACTIVATIONS, row[index - 1])
        if stages > 1 and index == 0:
            self._senders[Way.LABELS] = Sender(Way.LABELS, row[-1], delays.before[-1] + 2)
        if stages > 1 and last:
            self._receivers[Way.LABELS] = Receiver(Way.LABELS, row[0])

    # -- training -----------------------------------------------------------------------------

    def step(self, x: Tensor | None = None, y: Tensor | None = None) -> Tensor | None:
        """One iteration: a batch enters at the first stage. The loss of the one that ends at the last."""
        self._rates.check_given()
        if not self._pace.begin():
            self._loader.over = True
            return None
        self._batch = (x, y)
        self._rates.fed += 1
        self._samples += self._loader.samples
        self._loader.unused = 0
        self._position = (self._loader.epoch, self._loader.rounds)
        self._under_way = True
        return self._iterate(feed=True)

    def settle(self) -> None:
        """Bring to an end what is under way: iterations without new batches, and what an update waits for."""
        if self._under_way:
            for _ in range(self._schedule.delays.drain):
                self._iterate(feed=False)
            updates = self._updates
            self._carry_out_all(self._stage.finish())
            if self._updates > updates:
                self._busy_s, self._counted = 0.0, 0
                self._on_record()
            self._under_way = False
            assert self._stage.drained, "a pipeline is empty after as many iterations as its first delay"

    def _iterate(self, feed: bool) -> Tensor | None:
        self._busy_s, self._counted = 0.0, 0
        self._computing.loss = None
        waiting = len(self._stage.waiting)
        self._carry_out_all(self._stage.iteration(feed))
        if self._busy_s or waiting:
            self._on_record()
        loss = self._computing.loss
        if loss is not None:
            self._pace.report(loss=loss.item())
        return loss

    def _on_record(self) -> None:
        for sender in (self._senders[way] for way in self._senders):
            self._pace.sent("stage", sender.take_bytes())
        record = m.Iteration(
            time.monotonic(), self._busy_s, self._updates, self._counted, self._stage.staleness
        )
        self._pace.did(record)

    def _carry_out_all(self, steps: e.Steps) -> None:
        answer: Any = None
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration:
                return
            answer = self._carry_out(operation)

    def _carry_out(self, operation: e.Operation) -> Any:
        match operation:
            case e.TakeBatch():
                self._take_batch(operation.index)
            case e.TakeActivation():
                return self._take(Way.ACTIVATIONS)
            case e.TakeGradient():
                return self._take(Way.GRADIENTS)
            case e.Forward():
                self._forward(operation)
            case e.Backward():
                self._backward(operation)
            case e.SendActivation():
                self._senders[Way.ACTIVATIONS].send(operation.token, self._output)
            case e.SendGradient():
                self._senders[Way.GRADIENTS].send(operation.token, self._gradient)
            case e.Update():
                self._update(operation)
        return None

    def _take_batch(self, index: int) -> None:
        x, y = self._batch
        if x is None or y is None:
            raise ConfigError("pipe.step(x, y) at the first stage needs a batch: give what the loader gave.")
        self._input = x
        if Way.LABELS in self._senders:
            self._senders[Way.LABELS].send(index, y.clone())
        else:
            self._labels[index] = y

    def _take(self, way: Way) -> int | None:
        """A token; its tensor is what comes next."""
        got = self._receivers[way].take()
        tensor = None if got is None else got[1]
        if way is Way.ACTIVATIONS:
            self._input = tensor
        else:
            self._gradient = tensor
        return None if got is None else got[0]

    def _label(self, index: int) -> Tensor | None:
        if not self._stage.last:
            return None
        if Way.LABELS in self._receivers:
            got = self._receivers[Way.LABELS].take()
            assert got is not None
            assert got[0] == index, f"labels of batch {got[0]} came for batch {index}"
            return got[1]
        return self._labels.pop(index)

    def _forward(self, operation: e.Forward) -> None:
        labels, began = self._label(operation.index), time.perf_counter()
        assert self._input is not None
        self._sizes[operation.index] = len(self._input)
        self._output = self._computing.forward(operation, self._input, labels)
        self._busy_s += self._padding.until(began, FORWARD)

    def _backward(self, operation: e.Backward) -> None:
        began = time.perf_counter()
        gradient = None if self._stage.last else self._gradient
        self._gradient = self._computing.backward(operation, gradient)
        self._busy_s += self._padding.until(began, BACKWARD + (FORWARD if operation.again else 0.0))
        self._counted = self._sizes[operation.index] if self._stage.last else 0

    def _update(self, operation: e.Update) -> None:
        began = time.perf_counter()
        self._computing.average(len(operation.batches))
        self._along.update(sum(self._sizes.pop(index) for index in operation.batches))
        self._updates += 1
        self._rates.applied(len(operation.batches))
        if self._mesh.size("data") == 1:
            self._busy_s += time.perf_counter() - began

    @property
    def idle(self) -> bool:
        """Whether a resumed script only repeats what was done before."""
        return self._loader.repeats

    @property
    def loader(self) -> MeshLoader:
        """What deals out its batches."""
        return self._loader

    @property
    def resumable(self) -> bool:
        """Where copies differ, a checkpoint of one of them is not enough."""
        return self._along.agrees

    def close(self) -> None:
        """The last word on all ways."""
        for sender in self._senders.values():
            sender.end()
        for receiver in self._receivers.values():
            receiver.join()
        for sender in self._senders.values():
            sender.flush()

    # -- evaluation and what is saved ---------------------------------------------------------

    def evaluate(self, measure: Callable[[nn.Module], dict[str, float]]) -> m.Measured | None:
        """The lead measures; the other stages of its copy compute their parts until it has done so."""
        with as_one(self._computing.row, self._along):
            if self._mesh.index("data"):
                return None
            row, index = self._mesh.ranks("stage"), self._mesh.index("stage")
            if index:
                serve(self._computing.row, row, index)
                return None
            began = time.perf_counter()
            lead = Lead(self._computing.row, row)
            try:
                values = measure(lead)
            finally:
                lead.end()
            return m.Measured(values, time.perf_counter() - began, self._updates, self._samples)

    def part(self) -> CheckpointPart | None:
        """The stage's tensors, from the first copy; where copies differ, their mean."""
        with as_one(self._computing.row, self._along):
            if self._mesh.index("data"):
                return None
            row = self._computing.row
            model = {name: tensor.detach().clone() for name, tensor in row.state_dict().items()}
        tensors, values = export_optimizer(self._optimizer, row.named_parameters())
        return CheckpointPart(model, tensors, values, self._state())

    def _state(self) -> m.MeshState:
        return m.MeshState(
            mesh=self._mesh.axes,
            protocol=self._protocol,
            passes=self._position[0],
            batches=self._position[1] * self._mesh.size("data"),
            updates=self._updates,
            samples=self._samples,
            stepped_by=type(self._optimizer).__name__,
            schedule_steps=self._rates.steps,
        )
