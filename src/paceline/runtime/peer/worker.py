"""A worker among peers: its model and optimizer are its own, and it drives its protocol by itself.

`optimizer.step()` hands the gradient to the protocol and carries out what that asks for, up to where the
next gradient is needed. Vectors go to the others, and answers come back, by its carrier.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.protocols.core.meeting import call_of
from paceline.protocols.core.operations import (
    Agree,
    Average,
    Compute,
    Exchange,
    Mix,
    Now,
    Operation,
    Preview,
    Probe,
    Recall,
    Remember,
    Reset,
    Start,
    Step,
    Test,
    Vector,
    Wait,
)
from paceline.protocols.core.peer import Done, Me, Peer, iterations
from paceline.runtime.checkpoints.optimizer_state import State
from paceline.runtime.messages.workers import Meet
from paceline.runtime.peer.carrier import Carrier
from paceline.runtime.peer.evaluation import PeerEvaluation
from paceline.runtime.peer.optimizer import has_hooks, hasten
from paceline.runtime.peer.state import PeerState
from paceline.runtime.peer.steps import PeerSteps, rates
from paceline.runtime.peer.stopping import PeerEnding
from paceline.runtime.worker.emulation import Emulation, VirtualDevice
from paceline.runtime.worker.link import StoreLink
from paceline.runtime.worker.model.model_calls import renorming
from paceline.runtime.worker.worker import Worker
from paceline.store.cutting import cut_of
from paceline.store.optimizers import OptimizerSpec, check_suited
from paceline.store.replicas import buffer_parts, gradient_parts, parameter_parts
from paceline.store.together import parts_of
from paceline.store.vector import FlatVector


class PeerWorker(Worker):
    """One of several workers without a store."""

    def __init__(self, link: StoreLink, protocol: Peer, carrier: Carrier) -> None:
        simulated = link.config.cluster is not None
        device = VirtualDevice(link.computed) if simulated else Emulation(link.config, link.rank)
        super().__init__(link, device, peer=True)
        self._protocol, self._carrier = protocol, carrier
        self._connected = False
        self._begun = False
        """Whether the iteration has begun that comes next."""
        self._begins_late = False
        """Whether it does so when its batch is there."""

    # -- preparing ----------------------------------------------------------------------------

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
        self._trainer.bind(model, optimizer)
        ready = self._trainer.register(self._describe(optimizer), loader)
        self._peer = self._tied(optimizer)
        self._steps = PeerSteps(self._peer, self._carrier.memory_at)
        self._evaluation = PeerEvaluation(self._peer, self._carrier)
        self._ending = PeerEnding(self._peer, self._carrier, self._carry_out, self._heed_mixed)
        self._life = iterations(self._protocol, self._peer.me)
        self._begins_late = self._protocol.apart and loader is not None
        self._trainer.intake.repeats.on = self._protocol.probes
        self._trainer.replace_steps(self._step, self._zero_grad)
        self._carrier.connect(self._peer)
        self._connected = True
        self._protocol.start(self._peer.me)
        self._ending.resume()
        self._mention_caution(optimizer)
        self._mention_drift(model)
        if self._begins_late:
            self._trainer.intake.on_batch = self._begin
        else:
            self._begin()
        return self._training_begins(ready, model)

    def _mention_caution(self, optimizer: torch.optim.Optimizer) -> None:
        """Once for all workers."""
        text = self._protocol.caution(_momentum(optimizer)) if self.lead else ""
        if text:
            self._warn(text)

    def _mention_drift(self, model: nn.Module) -> None:
        """Say so if replicas that only average gradients do not stay equal."""
        found = renorming([model]) if self._protocol.in_unison and not self._trainer.shared else []
        for name, layer in found[:1]:
            self._warn(
                f"layer {name!r} has max_norm={layer.max_norm}: workers norm the rows of their own batches, "
                "so replicas do not stay equal, and nothing averages them. Leave it out, or use local_sgd"
            )

    def _describe(self, optimizer: torch.optim.Optimizer) -> OptimizerSpec:
        """It stays here, so its class and settings are nobody else's business; unless one step is for all."""
        check_suited(optimizer)
        for part in parts_of(optimizer):
            self._protocol.check_optimizer(type(part).__name__, _momentum(part))
        config = self._link.config
        apart = config.connects or config.private_weights or config.compress != "none"
        if self._protocol.in_unison and not apart and not has_hooks(optimizer):
            with contextlib.suppress(ConfigError):
                return self._trainer.describe()
        return OptimizerSpec(type(optimizer).__name__, ())

    def _tied(self, optimizer: torch.optim.Optimizer) -> PeerState:
        """What this worker is, now that its model lies in memory that its carrier knows."""
        layout = self._trainer.binding.layout
        segment, weights = self._carrier.ground(self._trainer.binding)
        if self._trainer.shared:
            self._trainer.fetch_state()
        else:
            for part in parts_of(optimizer):
                hasten(part)
        parameters = FlatVector(parameter_parts(layout, weights))
        buffers = FlatVector(buffer_parts(layout, segment))
        everybody, seed = tuple(range(self.size)), self._link.config.seed
        me = Me(self.rank, self.size, seed, parameters, buffers, self._carrier.keep, everybody)
        me.tensors = cut = cut_of(layout)
        if self._after_step.optimizers:
            me.after_step = partial(self._run_after_step, me)
        return PeerState(self._protocol, self._trainer, me, segment, gradient_parts(layout, segment), cut)

    def _heed_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._protocol.adds_moves:
            name = self._link.config.protocol or type(self._protocol).__name__
            self._after_step.refuse(
                f"under {name} what a worker moves by is added to a model that no worker has. Use a protocol "
                "such as dpsgd, local_sgd or asp."
            )
        super()._heed_after_step(optimizer)

    def _run_after_step(self, me: Me, weights: Vector) -> None:
        """On weights beside the model's: they take its place for a moment."""
        own = me.parameters.clone()
        me.parameters[:] = weights
        self._heed_mixed()
        weights[:] = me.parameters
        me.parameters[:] = own

    # -- one iteration ------------------------------------------------------------------------

    def _zero_grad(self, which: int, set_to_none: bool = True) -> None:
        self._carrier.cleared()
        super()._zero_grad(which, set_to_none)

    def _iterate(self, compute_s: float, missing: tuple[int, ...]) -> None:
        """The gradient is complete: go on to where the next one is needed."""
        trainer, me = self._trainer, self._peer.me
        self._begin()
        gradient = FlatVector(self._peer.gradient, frozenset(missing))
        if trainer.intake.repeats.wanted:
            trainer.intake.repeats.done()
            self._advance(gradient)
            return
        if self._looks() and not math.isfinite(gradient.dot(gradient)):
            gradient = self._steps.nothing()
        me.loss, me.rates = self._values.get("loss"), rates(trainer.optimizer)
        told, me.told = me.told, {}
        self._values |= told
        settings = trainer.changed() if trainer.shared else None
        record = trainer.push(compute_s, (), self._reported(), settings)
        equal = self._protocol.in_unison and not trainer.shared
        self._peer.record = structs.replace(record, rates=me.rates) if equal else record
        me.samples = 0 if gradient.norm == 0.0 else trainer.intake.weigh(trainer.which)
        self._advance(gradient)

    def _looks(self) -> bool:
        """Whether to look for what is not finite here, before it is given away."""
        config = self._link.config
        averaged = self._protocol.overlaps or self._protocol.in_unison  # then infinity is everybody's
        alone = not averaged if self._trainer.scaled else config.bad_gradient == "skip"
        return alone or config.compress != "none"

    def _begin(self) -> None:
        """Go on to where the next gradient is needed.

        Where workers are apart, that is when its batch is there: who has no more work must not have promised
        to others that it comes.
        """
        if not self._begun:
            self._begun = True
            self._advance(None)
            if self._protocol.apart:
                self._carrier.begins()

    def _advance(self, answer: Any) -> None:
        """Carry out the protocol's operations until it computes, or has completed an iteration."""
        while not isinstance(operation := self._life.send(answer), Compute | Probe):
            answer = self._carry_out(operation)
            if isinstance(operation, Done):
                self._begun = False
                break
        if not self._begun:
            if not self._begins_late:
                self._begin()
        elif isinstance(operation, Probe):
            self._trainer.intake.repeats.want(self._peer.buffers())
        else:
            self._trainer.intake.repeats.forget()

    def _carry_out(self, operation: Operation | Done) -> Any:
        peer, carrier = self._peer, self._carrier
        match operation:
            case Step() | Preview():
                return self._steps.apply(operation)
            case Reset():
                self._steps.reset()
            case Recall():
                return self._steps.recall()
            case Remember():
                self._steps.remember()
            case Average() | Mix():
                assert isinstance(operation.vector, FlatVector)
                return carrier.exchange(operation, operation.vector)
            case Agree():
                return carrier.meet(Meet(call_of(operation, peer.lane), push=peer.told())).outcome
            case Exchange():
                return carrier.trade(operation)
            case Start():
                return carrier.start(operation.operation)
            case Test():
                return carrier.test(operation.handle)
            case Now():
                return carrier.now()
            case Wait():
                return carrier.wait(operation.handle)
            case Done():
                self._heed_mixed()
                if peer.record is not None:
                    carrier.meet(Meet(push=peer.told()))
                if self._protocol.apart:
                    carrier.completed()
                self._ending.completed()
        return None

    def _heed_mixed(self) -> None:
        """What others were mixed into is to be as after a step. Where only gradients are averaged, it is."""
        if not self._protocol.in_unison and self._after_step.optimizers:
            for which in self._after_step.optimizers:
                self._after_step.run(which)
            self._trainer.binding.adopt_weights()

    # -- evaluating and saving ----------------------------------------------------------------

    def _away(self) -> None:
        if self._model is not None:
            self._trainer.adopt()
            self._evaluation.away()

    def _back(self, values: dict[str, float], seconds: float) -> None:
        if self._model is not None:
            self._trainer.evaluated()
            self._evaluation.check_worn()
            self._evaluation.back(values, seconds)

    def _apart(self) -> float:
        self._trainer.adopt()
        distance = self._evaluation.apart()
        self.report(**self._carrier.figures())
        return distance

    def _state_now(self) -> tuple[dict[str, Tensor], State]:
        """The mean of all models, and what the optimizer that steps here remembers."""
        self._trainer.check_reaches_state()
        self._trainer.adopt()
        state = self._link.recall() if self._trainer.shared else self._own_state()
        return self._model_now(), state

    def _model_now(self) -> dict[str, Tensor]:
        with self._evaluation.worn():
            return super()._model_now()

    def _whose(self) -> str:
        return "a replica of its own"

    # -- the run ------------------------------------------------------------------------------

    def _leave(self) -> None:
        together = self._connected and self._carrier.leaving()
        if together:
            self._settle()
        self._trainer.leave(self._reported(), self._waits, None, self._whose())
        if together:
            self._carrier.close()

    def _settle(self) -> None:
        """Bring to an end what is under way."""
        if self._steps.skipped:
            self._warn(f"rank {self.rank}: {self._steps.skipped} gradients were not finite and were skipped")
        self._trainer.adopt(leaving=True)
        if self._trainer.shared:
            self._trainer.binding.part()
        self._ending.settle()


def _momentum(optimizer: torch.optim.Optimizer) -> float:
    """The largest of its groups'."""
    return max(float(group.get("momentum") or 0.0) for group in optimizer.param_groups)
