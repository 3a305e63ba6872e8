"""Keeps the copies along an axis of a mesh in step, by driving a peer protocol's object there.

The protocol is the one that workers with whole models run (`allreduce`, `local_sgd`, `dpsgd`): its parameters
are those of this worker's part, its workers are the copies of that part. All copies do the same operations in
the same order, so they need no place to meet: averages are reductions over the axis's group, mixtures go
between neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import BadGradient, ConfigError
from paceline.protocols.core.operations import (
    Agree,
    Average,
    Compute,
    Handle,
    How,
    Mix,
    Operation,
    Recall,
    Remember,
    Reset,
    Start,
    Step,
    Wait,
)
from paceline.protocols.core.peer import Done, Me, Peer, life
from paceline.protocols.grid import Grid
from paceline.runtime.peer.steps import OptimizerMemory, rates
from paceline.store.vector import FlatVector

REDUCTIONS = {
    How.ANY: dist.ReduceOp.MAX,
    How.ALL: dist.ReduceOp.MIN,
    How.SUM: dist.ReduceOp.SUM,
    How.MIN: dist.ReduceOp.MIN,
    How.MAX: dist.ReduceOp.MAX,
}
MIX_TAG = 90


class Along:
    """One worker's copy of a part, among its copies."""

    def __init__(
        self,
        protocol: Peer,
        grid: Grid,
        named: Sequence[tuple[str, Tensor]],
        buffers: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        axis: str = "data",
        seed: int = 0,
        clip_norm: float | None = None,
        sent: Callable[[int], None] = lambda size: None,
        norm: Callable[[list[Tensor]], Tensor] = torch.nn.utils.get_total_norm,
    ) -> None:
        """`norm`: of gradients, where this worker has a part of them only."""
        self._named = [(name, p) for name, p in named if p.requires_grad]
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._sizes = _group_sizes(optimizer)
        self._parameters = [p for _, p in self._named]
        self._optimizer, self.clip_norm, self._sent = optimizer, clip_norm, sent
        self._take_step, self._norm = optimizer.step, norm  # before anybody replaces it
        self._ranks, self._size = grid.ranks(axis), grid.size(axis)
        self._index = grid.index(axis)
        self._group = None if self._size == 1 else grid.group(axis)  # type: ignore[attr-defined]
        self.protocol = protocol
        protocol.check(self._size)
        floats = [b for b in buffers if b.is_floating_point()]
        self._me = Me(
            self._index,
            self._size,
            seed,
            FlatVector([_flat(p) for p in self._parameters]),
            FlatVector([_flat(b) for b in floats]),
            members=tuple(range(self._size)),
        )
        self._memory = OptimizerMemory(optimizer, self._parameters)
        self._life = life(protocol, self._me)
        self._put_off: Mix | None = None
        """A mixture that was started: copies send to each other when they wait for it."""
        self._advance(None)

    def update(self, samples: int) -> None:
        """The gradients are complete: do what the protocol says, up to where the next ones are needed."""
        self._check_same()
        missing = frozenset(i for i, p in enumerate(self._parameters) if p.grad is None)
        for p in self._parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self._me.samples, self._me.rates = samples, rates(self._optimizer)
        self._advance(FlatVector([_flat(p.grad) for p in self._parameters if p.grad is not None], missing))
        for p in self._parameters:
            p.grad = None

    def _check_same(self) -> None:
        """Refuse what is trained only since the copies were made: nobody averages it."""
        thawed = next((name for name, p in self._frozen if p.requires_grad), None)
        if thawed is not None:
            raise ConfigError(
                "a parameter that was frozen when the model was prepared requires a gradient now: "
                f"{thawed!r}. Prepare it unfrozen: as long as it has no gradient it is not moved, and not "
                "decayed."
            )
        if _group_sizes(self._optimizer) != self._sizes:
            raise ConfigError("the optimizer got new parameters after pace.prepare(). Add them before.")

    @property
    def agrees(self) -> bool:
        """Whether all copies are equal after every update."""
        return self.protocol.agrees or self._size == 1

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The mean of all copies' tensors; each copy gets it."""
        if self._size == 1:
            return [tensor.clone() for tensor in tensors]
        made, _ = self._reduced([_flat(tensor) for tensor in tensors], 1.0)
        return [flat.view_as(tensor) for flat, tensor in zip(made, tensors, strict=True)]

    # -- carrying out -------------------------------------------------------------------------

    def _advance(self, answer: Any) -> None:
        while not isinstance(operation := self._life.send(answer), Compute):
            answer = self._carry_out(operation)

    def _carry_out(self, operation: Operation | Done) -> Any:
        match operation:
            case Step():
                self._step(operation)
            case Average():
                return self._average(operation)
            case Mix():
                return self._mix(operation)
            case Start() if isinstance(operation.operation, Mix):
                self._put_off = replace(operation.operation, vector=operation.operation.vector.clone())
                return Handle(1)
            case Wait() if self._put_off is not None:
                return self._mix(self._put_off)
            case Agree():
                return self._agree(operation)
            case Reset():
                self._optimizer.state.clear()
            case Recall():
                return self._memory.recall(self._blank)
            case Remember():
                self._memory.remember()
            case Done():
                pass
            case _:
                raise ConfigError(
                    f"{type(self.protocol).__name__} asks for {type(operation).__name__}, which copies along "
                    "an axis cannot do. Use allreduce, local_sgd or dpsgd."
                )
        return None

    def _step(self, operation: Step) -> None:
        gradient = operation.gradient
        assert isinstance(gradient, FlatVector)
        for i, (p, part) in enumerate(zip(self._parameters, gradient.parts, strict=True)):
            assert p.grad is not None
            if _flat(p.grad).data_ptr() != part.data_ptr():
                _flat(p.grad).copy_(part)
            if i in gradient.missing:
                p.grad = None
        norm = self._norm([p.grad for p in self._parameters if p.grad is not None])
        if not torch.isfinite(norm):
            raise BadGradient(
                f"NaN or infinity in the gradient of {self._bad()!r}; nothing was applied. Lower the "
                "learning rate, or clip (--clip-norm)."
            )
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.clip_norm, norm)
        self._take_step()
        for p in self._parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad

    def _bad(self) -> str:
        bad = (n for n, p in self._named if p.grad is not None and not bool(torch.isfinite(p.grad).all()))
        return next(bad, "?")

    def _blank(self) -> tuple[FlatVector, list[Tensor]]:
        zeros = [torch.zeros_like(p) for p in self._parameters]
        return FlatVector([_flat(zero) for zero in zeros]), zeros

    def _average(self, operation: Average) -> FlatVector:
        vector = operation.vector
        assert isinstance(vector, FlatVector)
        if self._size == 1:
            return vector
        return FlatVector(*self._reduced(vector.parts, operation.weight, vector.missing))

    def _reduced(
        self, parts: Sequence[Tensor], weight: float, missing: frozenset[int] = frozenset()
    ) -> tuple[list[Tensor], frozenset[int]]:
        """The weighted mean over the axis, and which parts are nobody's.

        The weights travel along, and behind them one number per part: whether it is there. What some copies
        have all of them step with; else those that have it would drift away from the others.
        """
        if len({part.dtype for part in parts}) > 1:
            raise ConfigError("a worker's part of the model has parameters of several types. Use one type.")
        there = [float(i not in missing) for i in range(len(parts))]
        told = torch.tensor([weight, *there], dtype=parts[0].dtype)
        scaled = torch.cat([*(part * weight for part in parts), told])
        dist.all_reduce(scaled, group=self._group)
        self._sent(scaled.numel() * scaled.element_size())
        *sums, told = torch.split(scaled, [*(part.numel() for part in parts), len(told)])
        total, *known = told.tolist()
        if total == 0.0:
            return self._reduced(parts, 1.0, missing)
        nobodys = frozenset(i for i, number in enumerate(known) if not number)
        return [summed / total for summed in sums], nobodys

    def _mix(self, operation: Mix) -> FlatVector:
        vector = operation.vector
        assert isinstance(vector, FlatVector)
        rows = operation.topology.rows(range(self._size), operation.step)
        mine, flat = rows[self._index], torch.cat(list(vector.parts))
        takers = [other for other, row in rows.items() if self._index in row and other != self._index]
        sent = [dist.isend(flat, self._ranks[other], tag=MIX_TAG) for other in takers]
        got = {other: torch.empty_like(flat) for other in mine if other != self._index}
        coming = [dist.irecv(got[other], self._ranks[other], tag=MIX_TAG) for other in got]
        for work in (*coming, *sent):
            assert work is not None
            work.wait()
        self._sent(len(takers) * flat.numel() * flat.element_size())
        mixed = torch.zeros_like(flat)
        for other in sorted(mine):
            mixed.add_(flat if other == self._index else got[other], alpha=mine[other])
        return FlatVector(torch.split(mixed, [part.numel() for part in vector.parts]))

    def _agree(self, operation: Agree) -> float | bool:
        value = torch.tensor([float(operation.value)], dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(value, REDUCTIONS[operation.how], group=self._group)
        agreed = float(value)
        return bool(agreed) if operation.how in (How.ANY, How.ALL) else agreed


@contextmanager
def as_one(model: nn.Module, along: Along) -> Iterator[None]:
    """Not in training, and with the copies' mean in the place of what differs between them."""
    modes = [(module, module.training) for module in model.modules()]
    changed: list[Tensor] = [] if along.agrees else list(model.parameters())
    changed += [b for b in model.buffers() if b.is_floating_point()]
    kept: list[Tensor] = []
    with torch.no_grad():
        if changed:
            kept = [tensor.detach().clone() for tensor in changed]
            for tensor, mean in zip(changed, along.mean(changed), strict=True):
                tensor.copy_(mean)
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for tensor, own in zip(changed, kept, strict=True):
                tensor.copy_(own)


def _group_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)
