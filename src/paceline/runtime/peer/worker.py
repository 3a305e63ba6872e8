"""A worker among peers: its model and optimizer are its own, and it drives its protocol by itself.

`optimizer.step()` hands the gradient to the protocol and carries out what that asks for, up to where the
next gradient is needed. Parameters, gradients and buffers lie in memory that the meeting place reads, so
giving a vector away copies nothing; only what a protocol has computed itself is copied there first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from paceline.errors import ConfigError, RunError
from paceline.protocols.core.meeting import call_of
from paceline.protocols.core.operations import (
    Agree,
    Average,
    Compute,
    Exchange,
    Handle,
    Mix,
    Operation,
    Preview,
    Probe,
    Recall,
    Remember,
    Reset,
    Start,
    Step,
    Test,
    Wait,
)
from paceline.protocols.core.parts import Part
from paceline.protocols.core.peer import Done, Me, Peer, life
from paceline.protocols.rules.compression import parse_compression
from paceline.runtime.messages.workers import Meet, Met, Push, Trade
from paceline.runtime.peer.compression import Packed, Packing
from paceline.runtime.peer.evaluation import PeerEvaluation
from paceline.runtime.peer.memory import Halves, PeerMemory
from paceline.runtime.peer.optimizer import has_hooks, hasten, not_finite, reads_only
from paceline.runtime.peer.steps import OptimizerMemory, rates, stepping
from paceline.runtime.run.member import smallest
from paceline.runtime.worker.link import StoreLink
from paceline.store.compression import matrices
from paceline.store.cutting import blank, cut_of
from paceline.store.optimizers import OptimizerSpec, check_suited
from paceline.store.replicas import (
    GRADIENTS,
    answer_parts,
    buffer_parts,
    gradient_parts,
    is_buffers,
    parameter_parts,
)
from paceline.store.together import parts_of
from paceline.store.vector import FlatVector

T = TypeVar("T")


class PeerWorker(PeerEvaluation):
    """One of several workers without a store."""

    peer = True

    def __init__(self, link: StoreLink, protocol: Peer) -> None:
        super().__init__(link, protocol)
        self._record: Push | None = None
        self._skipped = 0
        self._cleared = False
        """Whether the script has cleared its gradients since the last step."""
        self._spent = False
        """Whether it had at the last one, and the run may use the memory."""
        self._blank: tuple[FlatVector, list[Tensor]] | None = None
        self._lanes = 0
        self._free: list[tuple[Halves, Halves]] = []
        self._under_way: dict[int, tuple[tuple[Halves, Halves], FlatVector, Packed]] = {}

    # -- preparing ----------------------------------------------------------------------------

    def _describe(self, optimizer: torch.optim.Optimizer) -> OptimizerSpec:
        """It stays here, so its class and settings are nobody else's business; unless one step is for all."""
        check_suited(optimizer)
        config = self._link.config
        apart = config.connects or config.private_weights or config.compress != "none"
        if self._protocol.in_unison and not apart and not has_hooks(optimizer):
            with contextlib.suppress(ConfigError):
                return super()._describe(optimizer)
        return OptimizerSpec(type(optimizer).__name__, ())

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        self._plain_steps: list[Callable[[], Any]] = [part.step for part in parts_of(optimizer)]
        layout = self._layout = self._binding.layout
        segment, weights = self._ground()
        self._gradient = gradient_parts(layout, segment)
        parameters = FlatVector(parameter_parts(layout, weights))
        buffers = FlatVector(buffer_parts(layout, segment))
        answers = (each.bytes for each in self._link.segments[2:])
        self._answers = dict(zip((True, False), answers, strict=False))
        self._shown: dict[int, list[Tensor]] = {}
        if self._shared:
            self._fetch_state(optimizer)
        else:
            for part in parts_of(optimizer):
                hasten(part)
        self._repeats.on = self._protocol.probes
        self._memories = PeerMemory(layout, self.rank)
        for place, parts in enumerate((parameters.parts, self._gradient, buffers.parts)):
            self._memories.know(parts, place)
        config = self._link.config
        self._me = Me(
            self.rank, self.size, config.seed, parameters, buffers, self._keep, tuple(range(self.size))
        )
        self._cut = self._me.tensors = cut_of(layout)
        how = parse_compression(config.compress)
        found, wired = matrices(layout, int(how.amount or 0)), config.listen is not None
        self._packing = Packing(how, self._me, found, wired=wired)
        self._remembered = OptimizerMemory(optimizer, self._binding.trained)
        self._life = life(self._protocol, self._me, self._resume)
        self._replace(optimizer)
        self._connect()
        self._advance(None)

    def _ground(self) -> tuple[Tensor, Tensor]:
        """What the model is tied to: the segment of gradients and buffers, and the weights."""
        self._binding.require_cpu()
        segment, weights, *_ = self._link.segments
        return segment.bytes, weights.bytes

    def _connect(self) -> None:
        """What a fabric needs besides memory; shared memory needs nothing."""

    # -- one iteration ------------------------------------------------------------------------

    def _iterate(self, compute_s: float, missing: tuple[int, ...]) -> None:
        """The gradient is complete: go on to where the next one is needed."""
        gradient, config = FlatVector(self._gradient, frozenset(missing)), self._link.config
        if self._repeats.wanted:
            self._repeats.done()
            self._advance(gradient)
            return
        averaged = self._protocol.overlaps or self._protocol.in_unison  # then infinity is everybody's
        alone = not averaged if self._scaled else config.bad_gradient == "skip"
        looks = alone or config.compress != "none"
        if looks and not math.isfinite(gradient.dot(gradient)):
            gradient = self._nothing()
        assert self._optimizer is not None
        self._me.loss, self._me.rates = self._values.get("loss"), rates(self._optimizer)
        told, self._me.told = self._me.told, {}
        self._values |= told
        self._record = self._push(compute_s, (), self._changed() if self._shared else None)
        self._me.samples = 0 if gradient.norm == 0.0 else self._weigh
        self._advance(gradient)

    def _nothing(self) -> FlatVector:
        """A gradient that takes no part: it was not finite."""
        self._refuse()
        for part in self._gradient:
            part.zero_()
        nothing = FlatVector(self._gradient, frozenset(range(len(self._layout.trained))))
        nothing.norm = 0.0
        return nothing

    def _advance(self, answer: Any) -> None:
        """Carry out the protocol's operations until it computes."""
        while not isinstance(operation := self._life.send(answer), Compute | Probe):
            answer = self._carry_out(operation)
        if isinstance(operation, Probe):
            self._repeats.want(self._all_buffers())
        else:
            self._repeats.forget()

    def _carry_out(self, operation: Operation | Done) -> Any:
        match operation:
            case Step() | Preview():
                return self._apply(operation)
            case Reset():
                assert self._optimizer is not None
                self._optimizer.state.clear()
            case Recall():
                return self._remembered.recall(lambda: blank(self._layout))
            case Remember():
                self._remembered.remember()
            case Average() | Mix():
                assert isinstance(operation.vector, FlatVector)
                return self._exchange(operation, operation.vector)
            case Agree():
                return self._meet(Meet(call_of(operation, self._lane), push=self._told())).outcome
            case Exchange():
                return self._trade(operation)
            case Start():
                return self._start(operation.operation)
            case Test():
                return self._meet(Meet(wait=operation.handle.lane, test=True)).outcome
            case Wait():
                return self._wait(operation.handle)
            case Done():
                if self._record is not None:
                    self._meet(Meet(push=self._told()))
                self._completed()
        return None

    # -- stepping -----------------------------------------------------------------------------

    def _apply(self, operation: Step | Preview) -> None:
        gradient, part, optimizer = operation.gradient, operation.part, self._optimizer
        assert isinstance(gradient, FlatVector)
        assert optimizer is not None
        norm = self._cut.length(gradient, part)
        if not math.isfinite(norm):
            return self._refuse()
        if self._shared:
            return None  # the run has, for all
        clip = smallest(self._link.config.clip_norm, self._clip_to)
        if clip is not None and norm > clip:
            gradient = gradient * (clip / (norm + 1e-6))
        missing = gradient.missing | self._cut.others(part)
        self._binding.show_gradients(self._visible(gradient, part), missing)
        with stepping(optimizer, operation):
            self._plain_steps[self._which]()
        self._binding.show_gradients(None)
        return None

    def _visible(self, gradient: FlatVector, part: Part | None) -> list[Tensor] | None:
        """The gradients that the optimizer is to read; None: those of this worker's segment."""
        start = gradient.parts[0].data_ptr()
        if start == self._gradient[0].data_ptr():
            return None
        memory = next((each for each in self._answers.values() if each.data_ptr() == start), None)
        memory = self._memories.lent_at(start) if memory is None else memory
        if memory is None or not reads_only(self._optimizer):
            if part is None:
                FlatVector(self._gradient)[:] = gradient
                return None
            return self._beside(gradient, part)  # the rest of the worker's own is still needed
        if start not in self._shown:
            self._shown[start] = [slot.view(memory, slot.offset) for slot in self._layout.trained]
        return self._shown[start]

    def _beside(self, gradient: FlatVector, part: Part) -> list[Tensor]:
        """A part of a gradient in memory of its own."""
        if self._blank is None:
            self._blank = blank(self._layout)
        self._cut.copy(gradient, self._blank[0], part)
        return self._blank[1]

    def _refuse(self) -> None:
        """What was to be applied is not finite."""
        if self._scaled:
            self._overflowed = True
            return
        if self._link.config.bad_gradient == "skip":
            self._skipped += 1
            return
        raise not_finite(self.rank, self._binding.bad_parameter())

    # -- meeting ------------------------------------------------------------------------------

    def _exchange(self, operation: Average | Mix, vector: FlatVector) -> FlatVector:
        if self._shared:
            return self._in_unison(operation, vector)
        packed = self._packing.pack(operation)
        call, size = call_of(operation, self._lane, packed.size_bytes), packed.written_bytes(operation)
        if size:
            place = self._memories.at(self._memories.scratch(like_parameters=True))
            self._memories.write(packed.pieces, place)
        else:
            place = self._memories.place(packed.vector, self._like_parameters)
        missing = tuple(sorted(vector.missing))
        met = self._meet(Meet(call, place, missing=missing, push=self._told(), packed=size))
        answer = answer_parts(self._layout, self._answers[met.shared])[is_buffers(place)]
        return packed.opened(_answered(answer, met))

    def _in_unison(self, operation: Average | Mix, vector: FlatVector) -> FlatVector:
        """The run averages and steps for all. Nobody else has to see the mean, and it may take the place of
        gradients in a script that clears them after every step."""
        missing, call = tuple(sorted(vector.missing)), call_of(operation, self._lane)
        self._cleared &= len(self._since) == 1  # what is left there is another optimizer's
        if self._spent and not self._cleared:
            self._warn(
                f"rank {self.rank} has not cleared its gradients since its last step, as it had before. What "
                "is left there may be the mean of all; with --private-weights it is its own"
            )
        self._spent, self._cleared = self._cleared, False
        met = self._meet(Meet(call, GRADIENTS, missing=missing, push=self._told(), spent=self._spent))
        return _answered(vector.parts, met)

    def _zero_grad(self, which: int, set_to_none: bool = True) -> None:
        self._cleared = True
        super()._zero_grad(which, set_to_none)

    def _start(self, operation: Average | Mix) -> Handle:
        """Send off a copy, so that the worker may go on; the answer gets memory of its own."""
        vector, self._lanes, lend = operation.vector, self._lanes + 1, self._memories.lend
        assert isinstance(vector, FlatVector)
        slot = self._free.pop() if self._free else (lend("what is sent off"), lend("answers"))
        half = not self._like_parameters(vector)
        there, back = slot[0][half], slot[1][half]
        packed = self._packing.pack(operation)
        place, into = (self._memories.at(each) for each in (there, back))
        size = packed.written_bytes(operation)
        if size:
            self._memories.write(packed.pieces, place)
        else:
            self._cut.copy(packed.vector, there, operation.part if isinstance(operation, Average) else None)
        missing = tuple(sorted(vector.missing))
        call = call_of(operation, self._lanes, packed.size_bytes)
        self._say(Meet(call, place, into, missing=missing, packed=size), self._link.begin)
        self._under_way[self._lanes] = slot, back, packed
        return Handle(self._lanes)

    def _trade(self, operation: Exchange) -> FlatVector:
        vector = operation.vector
        assert isinstance(vector, FlatVector)
        trade = Trade(operation.rule, operation.cell, operation.other, operation.rate)
        place = self._memories.place(vector, self._like_parameters)
        met = self._meet(Meet(trade=trade, place=place, push=self._told()))
        return _answered(answer_parts(self._layout, self._answers[False])[is_buffers(place)], met)

    def _wait(self, handle: Handle) -> FlatVector:
        met = self._meet(Meet(wait=handle.lane, push=self._told()))
        slot, back, packed = self._under_way.pop(handle.lane)
        self._free.append(slot)
        return packed.opened(_answered(back.parts, met))

    def _say(self, message: Meet, how: Callable[[Meet, tuple[int, ...]], T]) -> T:
        """Tell it to the meeting place, with memory that is lent from now on, and what stands for us."""
        fds = self._memories.unsent()
        cell = self._protocol.cell(self._me)
        stage = self._protocol.stage(self._me)
        message = msgspec.structs.replace(message, model=self._model_place(), cell=cell, stage=stage)
        told = how(message, tuple(each.fd for each in fds))
        for each in fds:
            each.close_fd()
        return told

    def _meet(self, message: Meet) -> Met:
        met = self._say(message, self._link.meet)
        self._me.members = met.members
        self._until, self._save_at = met.until, met.save_at
        if met.release is not None:
            self._position = self._before + met.release.position
        return met

    def _told(self) -> Push | None:
        """What is to be put on record, once."""
        record, self._record = self._record, None
        return record

    def _model_place(self) -> int:
        model = self._protocol.model(self._me)
        assert isinstance(model, FlatVector)
        place = self._memories.find(model)
        if place is None:
            raise RunError(
                f"{type(self._protocol).__name__}.model() gave a vector that the run cannot see. "
                "Give parameters, or what me.keep() made."
            )
        return place

    def _keep(self, vector: Any) -> FlatVector:
        kept = self._memories.lend("a protocol")[not self._like_parameters(vector)]
        kept[:] = vector
        return kept

    def _like_parameters(self, vector: FlatVector) -> bool:
        return [part.numel() for part in vector.parts] == [part.numel() for part in self._gradient]

    # -- the end ------------------------------------------------------------------------------

    def _whose(self) -> str:
        return "a replica of its own"

    def _leave(self) -> None:
        if self._skipped:
            self._warn(f"rank {self.rank}: {self._skipped} gradients were not finite and were skipped")
        if self._shared:
            self._binding.part()
        super()._leave()


def _answered(parts: Sequence[Tensor], met: Met) -> FlatVector:
    answer = FlatVector(parts, frozenset(met.missing))
    answer.norm = met.norm
    return answer
