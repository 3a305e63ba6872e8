"""Drives a peer protocol: all workers in this process, real vectors, one meeting place.

    crew = Crew(LocalSGD(period=4), workers=3, gradient=quadratic(3))
    crew.run(12)
    assert crew.equal()

Workers take turns in a random order drawn from a seed, so nothing may depend on who comes first.
Vectors that an operation answered are spoilt as soon as they are no longer good, so that a protocol
that keeps one is found out. Joint operations that do not fit together raise what a real run would say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any

import torch
from torch import Tensor

from paceline.protocols.core.meeting import SETTLING, Gathered, Meeting, Turn, call_of
from paceline.protocols.core.operations import (
    Agree,
    Compute,
    Exchange,
    Handle,
    Mix,
    Now,
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
from paceline.runtime.peer.compression import Packing
from paceline.runtime.peer.steps import OptimizerMemory, rates, stepping
from paceline.store.cells import Cells
from paceline.store.compression.codecs import Matrix
from paceline.store.cutting import Cut, TensorSpan
from paceline.store.vector import FlatVector
from support.problems import SIZE, Gradient, MakeOptimizer, Samples, sgd

TENSORS = (2, 1, 3)
"""Elements of the tensors that a model consists of, unless told otherwise."""


class Crew:
    """The workers of one run."""

    def __init__(
        self,
        protocol: Peer,
        workers: int,
        gradient: Gradient,
        *,
        seed: int = 0,
        optimizer: MakeOptimizer = sgd,
        initial: Callable[[int], Tensor] | None = None,
        buffers: Callable[[int], Tensor] | None = None,
        samples: Samples = lambda rank, iteration: 4,
        compress: str = "none",
        matrices: Sequence[Sequence[Matrix]] = ((),),
        tensors: Sequence[int] = TENSORS,
        loss: Callable[[int, int], float | None] = lambda rank, iteration: 1.0 / (1 + iteration),
        rate: Callable[[int], float] | None = None,
        travel: Callable[[int, int], int] = lambda rank, lane: 0,
    ) -> None:
        """`loss`: what a rank's script reports; `rate`: the learning rate at an iteration, if it changes;
        `travel`: iterations of a rank until what it has started, complete elsewhere, reaches it."""
        protocol.check(workers)
        self.clock: Callable[[int], float] = lambda rank: 0.0
        """What a rank is told when it asks for the time."""
        self.tensors, self.loss, self.rate, self.travel = tensors, loss, rate, travel
        self.waited = 0
        """How often somebody had to wait for what was still travelling."""
        self.compress, self.matrices = parse_compression(compress), matrices
        self.protocol, self.gradient, self.samples = protocol, gradient, samples
        self.random = Random(seed)
        self.meeting = Meeting()
        self.counts: Counter[str] = Counter()
        """Joint operations carried out, by kind."""
        self.sent: Counter[int] = Counter()
        """Bytes of the vectors each rank gave away."""
        self.log: list[tuple[int, int, str]] = []
        """(rank, its iteration, operation), in the order in which they were asked for."""
        start = torch.linspace(-1, 1, SIZE, dtype=torch.float64) if initial is None else initial(0)
        self.cells = Cells([start])
        self.workers = [
            _Worker(self, rank, workers, seed, optimizer, initial, buffers) for rank in range(workers)
        ]

    def run(self, iterations: int, *, dies: dict[int, int] | None = None) -> Crew:
        """Let everybody complete so many iterations; `dies`: rank -> iteration it does not complete."""
        for worker in self.workers:
            worker.goal, worker.dies_in = worker.me.count + iterations, (dies or {}).get(worker.me.rank)
        while runnable := [worker for worker in self.workers if worker.runnable]:
            self.random.choice(runnable).turn()
        stuck = [worker.me.rank for worker in self.workers if worker.alive and worker.me.count < worker.goal]
        assert not stuck, f"ranks {stuck} wait for ever"
        return self

    def finish(self, iterations: int) -> Crew:
        """Let everybody complete so many iterations, and leave when it has."""
        for worker in self.workers:
            worker.goal = iterations
        while runnable := [worker for worker in self.living if not worker.asleep and not worker.settled]:
            worker = self.random.choice(runnable)
            if worker.me.count < iterations:
                worker.turn()
                continue
            worker.settled = True
            for gathered in self.meeting.leave(worker.me.rank):
                self.carry_out(gathered)
        stuck = [worker.me.rank for worker in self.living if not worker.settled]
        assert not stuck, f"ranks {stuck} wait for ever"
        return self

    def settle(self) -> Crew:
        """Nobody goes on: bring to an end what is under way."""
        for worker in self.living:
            worker.retire()
        while runnable := [worker for worker in self.living if not worker.asleep and not worker.settled]:
            self.random.choice(runnable).turn()
        stuck = [worker.me.rank for worker in self.living if not worker.settled]
        assert not stuck, f"ranks {stuck} wait for ever"
        return self

    @property
    def living(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.alive]

    def parameters(self) -> list[Tensor]:
        """Every living worker's, by rank."""
        return [worker.x.detach().clone() for worker in self.living]

    def models(self) -> list[Tensor]:
        """What stands for each living worker."""
        models = []
        for worker in self.living:
            cell = self.protocol.cell(worker.me)
            own: Any = self.protocol.model(worker.me)
            models.append((own.parts if cell is None else self.cells[cell])[0].clone())
        return models

    def mean(self) -> Tensor:
        return torch.stack(self.parameters()).mean(0)

    def equal(self) -> bool:
        """Whether all replicas are the same, bit for bit."""
        first, *others = self.parameters()
        return all(torch.equal(first, other) for other in others)

    def carry_out(self, gathered: Gathered) -> None:
        """Give every receiver its answer."""
        self.counts[gathered.kind] += 1
        lane, turn = gathered.lane, gathered.turn
        brought = {rank: self.workers[rank].brought[turn] for row in gathered.rows.values() for rank in row}
        answers = {}
        for rank in gathered.receivers:
            answers[rank] = gathered.outcome
            if gathered.kind != "agree":
                parts = [(brought[peer].vector, share) for peer, share in gathered.rows[rank].items()]
                answers[rank] = self.cut_to(gathered.part, _sum(parts))
        for rank, answer in answers.items():
            if lane > 0:
                self.workers[rank].arrived(lane, answer)
            else:
                worker = self.workers[rank]
                worker.wake(worker.open(lane, answer))

    def cut_to(self, part: Part | None, answer: FlatVector) -> FlatVector:
        """Of tensors that were not asked for, an answer means nothing."""
        if part is None:
            return answer
        meaningless = FlatVector([torch.full_like(each, float("nan")) for each in answer.parts])
        cut_of(self.tensors).copy(answer, meaningless, part)
        return meaningless


def cut_of(tensors: Sequence[int]) -> Cut:
    """So many elements of eight bytes each, one tensor after another."""
    ends = list(accumulate(tensors))
    return Cut([TensorSpan(0, end - count, end, 8 * count) for end, count in zip(ends, tensors, strict=True)])


class _Worker:
    def __init__(
        self,
        crew: Crew,
        rank: int,
        size: int,
        seed: int,
        optimizer: MakeOptimizer,
        initial: Callable[[int], Tensor] | None,
        buffers: Callable[[int], Tensor] | None,
    ) -> None:
        self.crew = crew
        start = torch.linspace(-1, 1, SIZE, dtype=torch.float64) if initial is None else initial(rank)
        self.x = start.clone()
        self.buffers = [] if buffers is None else [buffers(rank).clone()]
        self.me = Me(
            rank, size, seed, FlatVector([self.x]), FlatVector(self.buffers), members=tuple(range(size))
        )
        self.views = list(self.x.split(list(crew.tensors)))
        self.optimizer = optimizer(self.views)
        self.memory = OptimizerMemory(self.optimizer, self.views)
        self.cut = self.me.tensors = cut_of(crew.tensors)
        self.packing = Packing(crew.compress, self.me, crew.matrices)
        self.opening: dict[int, Any] = {}
        self.life = life(crew.protocol, self.me)
        self.alive, self.asleep = True, False
        self.settled = False
        self.place: Tensor | None = None
        self.blocking = 0
        """The lane of what it sleeps for."""
        self.brought: dict[Turn, Any] = {}
        self.lanes = 0
        self.ready: dict[int, Any] = {}
        self.reaches: dict[int, int] = {}
        """The iteration in which what was started is here, by lane."""
        self.waits_for: int | None = None
        self.answer: Any = None
        self.given: list[FlatVector] = []
        self.goal, self.dies_in = 0, None
        crew.meeting.join(rank)

    @property
    def runnable(self) -> bool:
        return self.alive and not self.asleep and self.me.count < self.goal

    def turn(self) -> None:
        """Go on to the next operation, and do it or wait for it."""
        answer, self.answer = self.answer, None
        try:
            operation = self.life.send(answer)
        except StopIteration:
            self.settled = True
            return
        if isinstance(operation, Done):
            return
        self.crew.log.append((self.me.rank, self.me.count, type(operation).__name__))
        match operation:
            case Compute():
                self._compute()
            case Probe():
                self.answer = self._gradient()
            case Step() | Preview():
                self._step(operation)
            case Reset():
                self.optimizer.state.clear()
            case Recall():
                self.answer = self.memory.recall(self._blank)
            case Remember():
                self.memory.remember()
            case Exchange():
                self.wake(self._exchange(operation))
            case Start():
                self._start(operation.operation)
            case Now():
                self.answer = self.crew.clock(self.me.rank)
            case Test():
                self.answer = self.is_here(operation.handle.lane)
            case Wait():
                self.waits_for, self.asleep = operation.handle.lane, True
                self._take()
            case _:
                self.asleep = True
                self._meet(operation, self.blocking)

    def _blank(self) -> tuple[FlatVector, list[Tensor]]:
        flat = torch.zeros_like(self.x)
        return FlatVector([flat]), list(flat.split(list(self.crew.tensors)))

    def retire(self) -> None:
        self.blocking = SETTLING
        for gathered in self.crew.meeting.retire(self.me.rank):
            self.crew.carry_out(gathered)
        self.life = self.crew.protocol.settle(self.me)

    def open(self, lane: int, answer: Any) -> Any:
        """What the protocol gets of an answer."""
        opened = self.opening.pop(lane, None)
        return opened(answer) if opened is not None and isinstance(answer, FlatVector) else answer

    def arrived(self, lane: int, answer: Any) -> None:
        self.ready[lane] = answer
        self.reaches[lane] = self.me.count + self.crew.travel(self.me.rank, lane)
        self._take()

    def is_here(self, lane: int) -> bool:
        return lane in self.ready and self.me.count >= self.reaches[lane]

    def _take(self) -> None:
        """Wake up if what it waits for is there."""
        if self.waits_for in self.ready:
            self.crew.waited += not self.is_here(self.waits_for)
            answer = self.open(self.waits_for, self.ready.pop(self.waits_for))
            self.waits_for = None
            self.wake(answer)

    def _exchange(self, operation: Any) -> FlatVector:
        crew = self.crew
        crew.counts["exchange"] += 1
        crew.sent[self.me.rank] += operation.rule.travels(operation.vector.size_bytes)[0]
        there = {worker.me.rank for worker in crew.living}
        other = operation.other if operation.other in there else None
        answer = operation.vector.clone()
        vector = operation.vector.parts
        crew.cells.exchange(operation.rule, operation.cell, other, operation.rate, vector, answer.parts)
        return answer

    def _start(self, operation: Any) -> None:
        self.lanes += 1
        if isinstance(operation, Exchange):
            self.arrived(self.lanes, self._exchange(operation))
        else:
            self._meet(operation, self.lanes)
        self.answer = Handle(self.lanes)

    def wake(self, answer: Any) -> None:
        self.asleep, self.answer = False, answer
        for vector in self.given:
            for part in vector.parts:
                part.fill_(float("nan"))
        self.given = [answer] if isinstance(answer, FlatVector) else []

    def die(self) -> None:
        self.alive = False
        for gathered in self.crew.meeting.leave(self.me.rank):
            self.crew.carry_out(gathered)

    def _compute(self) -> None:
        rank, iteration = self.me.rank, self.me.count
        if self.dies_in == iteration:
            self.die()
            return
        self.me.samples = self.crew.samples(rank, iteration)
        self.me.loss = self.crew.loss(rank, iteration)
        if self.crew.rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.crew.rate(iteration)
        self.me.rates = rates(self.optimizer)
        self.answer = self._gradient()

    def _gradient(self) -> FlatVector:
        gradient = self.crew.gradient(self.me.rank, self.me.count, self.x.detach().clone())
        if self.crew.protocol.probes:  # there is one place for gradients
            self.place = gradient if self.place is None else self.place.copy_(gradient)
            gradient = self.place
        return FlatVector([gradient])

    def _step(self, operation: Any) -> None:
        skipped, gradient = self.cut.others(operation.part), operation.gradient.parts[0].clone()
        for i, (view, part) in enumerate(
            zip(self.views, gradient.split(list(self.crew.tensors)), strict=True)
        ):
            view.grad = None if i in skipped else part
        with stepping(self.optimizer, operation):
            self.optimizer.step()

    def _meet(self, operation: Any, lane: int) -> None:
        sent_bytes = None
        if not isinstance(operation, Agree):
            packed = self.packing.pack(operation)
            sent_bytes, self.opening[lane] = packed.size_bytes, packed.opened
            self.crew.sent[self.me.rank] += sent_bytes
            # what becomes of a vector later on is nobody else's business
            lasts = lane > 0 or (isinstance(operation, Mix) and operation.ahead is not None)
            vector = packed.vector.clone() if lasts else packed.vector
            operation = replace(operation, vector=vector)
        call = call_of(operation, lane, sent_bytes)
        self.brought[call.turn] = operation
        for gathered in self.crew.meeting.arrive(self.me.rank, call):
            self.crew.carry_out(gathered)


def _sum(parts: list[tuple[Any, float]]) -> FlatVector:
    (first, share), *others = parts
    total = first * share
    for vector, share in others:
        total = total + vector * share
    return total
