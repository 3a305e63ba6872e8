"""Carries a HAP program out on one rank: real tensors, cut by the plan's ratios, connected by uneven
collectives.

Backward is autograd's: every collective has its adjoint. What is left to do after it is to add up the
gradients of replicated parameters (`add_up`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paceline.errors import ConfigError, RunError
from paceline.parallel.plans.uneven import (
    AllGather,
    AllReduce,
    Collect,
    Exchange,
    ReduceScatter,
    Slice,
    cut,
    gather_pieces,
)
from paceline.plan.hap.graph import Node
from paceline.plan.hap.operations import Seen
from paceline.plan.hap.plan import HapPlan
from paceline.plan.hap.program import Instruction
from paceline.plan.hap.rules import dim_of, granules, round_lengths
from paceline.plan.hap.trace import Traced


class HapProgram:
    """A model as this rank computes it. Cuts the model's parameters in place."""

    def __init__(self, model: nn.Module, traced: Traced, plan: HapPlan, seed: int = 0) -> None:
        self.model, self.traced, self.plan = model, traced, plan
        self.graph = traced.graph.parts(plan.segments)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._check()
        self.nodes, self.sizes = self.graph.by_name(), granules(self.graph)
        self.parameters = dict(model.named_parameters())
        self.steps, self.seed = 0, seed
        self._inputs = [node for node in self.graph.nodes if node.op == "input"]
        self._segments = {name: node.segment for node in reversed(self.graph.nodes) for name in node.inputs}
        for name, held in plan.program.placements.items():
            dim = dim_of(held)
            if dim is not None:
                lengths = self.lengths(name, dim, self._segments[name])
                self.parameters[name].data = cut(self.parameters[name].data, dim, lengths, self.rank).clone()

    def _check(self) -> None:
        if self.plan.workers != self.size:
            raise ConfigError(f"the plan is for {self.plan.workers} workers, but {self.size} were started.")
        if self.plan.fingerprint != self.graph.fingerprint():
            raise ConfigError(
                f"the plan is for another model or batch than the script's ({self.plan.fingerprint} against "
                f"{self.graph.fingerprint()}). Plan again with `paceline plan hap`."
            )

    def lengths(self, name: str, dim: int, segment: int) -> list[int]:
        """How much of a dimension each rank has."""
        size = self.sizes[name, dim]
        units = self.nodes[name].shape[dim] // size
        return [size * each for each in round_lengths(self.plan.ratios[segment], units)]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The output, whole; or this rank's summand, if it is a loss."""
        if kwargs or len(args) != len(self._inputs):
            raise ConfigError(f"the planned model takes {len(self._inputs)} tensors by position.")
        for node, value in zip(self._inputs, args, strict=True):
            if tuple(value.shape) != node.shape:
                raise ConfigError(
                    f"the plan is for inputs of shape {node.shape}, got {tuple(value.shape)}. Batches have "
                    "to be equal."
                )
        self.steps += 1
        held: dict[tuple[str, str], Tensor] = {}
        given = dict(zip((node.name for node in self._inputs), args, strict=True))
        for each in self.plan.program.instructions:
            if each.kind == "finish":
                return self._finish(each, held)
            if each.kind == "compute":
                held[each.tensor, each.after] = self._compute(each, held, given)
            else:
                held[each.tensor, each.after] = self._move(each, held[each.tensor, each.before[0]])
        raise RunError("the program has no end.")

    # -- moving -------------------------------------------------------------------------------

    def _move(self, each: Instruction, value: Tensor) -> Tensor:
        before, after = dim_of(each.before[0]), dim_of(each.after)
        result: Any
        if each.kind == "all_reduce":
            result = _apply(AllReduce, value)
        elif each.kind == "all_to_all":
            assert before is not None
            assert after is not None
            old, new = (self.lengths(each.tensor, d, each.segment) for d in (before, after))
            result = _apply(Exchange, value, before, old, after, new)
        elif each.kind == "slice":
            result = _apply(Slice, value, after, self.lengths(each.tensor, after or 0, each.segment))
        else:
            dim = before if before is not None else after
            assert dim is not None
            kind = AllGather if each.kind == "all_gather" else ReduceScatter
            result = _apply(kind, value, dim, self.lengths(each.tensor, dim, each.segment), each.variant)
        made: Tensor = result
        return made

    def _finish(self, each: Instruction, held: dict[tuple[str, str], Tensor]) -> Tensor:
        value = held[each.tensor, each.before[0]]
        if self.graph.loss:
            return value
        dim = dim_of(each.before[0])
        lengths = [] if dim is None else self.lengths(each.tensor, dim, each.segment)
        made: Any = _apply(Collect, value, each.before[0], lengths, each.variant)
        whole: Tensor = made
        return whole

    # -- computing ----------------------------------------------------------------------------

    def _compute(
        self, each: Instruction, held: dict[tuple[str, str], Tensor], given: dict[str, Tensor]
    ) -> Tensor:
        node, seen = self.nodes[each.tensor], self.traced.seen[each.tensor]
        values = [
            self._fetch(name, wanted, each.segment, held, given)
            for name, wanted in zip(node.inputs, each.before, strict=True)
        ]
        return self._carry_out(node, seen, values, each.after)

    def _fetch(
        self,
        name: str,
        wanted: str,
        segment: int,
        held: dict[tuple[str, str], Tensor],
        given: dict[str, Tensor],
    ) -> Tensor:
        op, dim = self.nodes[name].op, dim_of(wanted)
        if op == "parameter":
            return self.parameters[name]
        if op in ("input", "constant"):
            value = given[name] if op == "input" else self.traced.seen[name].value
            assert value is not None
            return value if dim is None else cut(value, dim, self.lengths(name, dim, segment), self.rank)
        return held[name, wanted]

    def local_shape(self, node: Node, held: str) -> list[int]:
        """Of a result, on this rank."""
        shape, dim = list(node.shape), dim_of(held)
        if dim is not None:
            shape[dim] = self.lengths(node.name, dim, node.segment)[self.rank]
        return shape

    def _carry_out(self, node: Node, seen: Seen, values: list[Tensor], after: str) -> Tensor:
        assert seen.node is not None
        part: Any = self.model.get_submodule(str(seen.node.target)) if seen.node.op == "call_module" else None
        if node.op == "linear":
            return F.linear(values[0], values[1])
        if node.op == "bias":
            at = node.attrs["dim"]
            return values[0] + values[1].view([-1 if d == at else 1 for d in range(len(node.shape))])
        if node.op in ("conv", "pool", "attention") and not all(value.numel() for value in values):
            return _nothing(self.local_shape(node, after), values)
        if node.op == "conv":
            groups = part.groups
            return F.conv2d(values[0], values[1], None, part.stride, part.padding, part.dilation, groups)
        if node.op == "embedding":
            found: Tensor = F.embedding(values[0], values[1], part.padding_idx)
            return found
        if node.op == "norm":
            weights = dict(
                zip([k for k in ("weight", "bias") if getattr(part, k) is not None], values[1:], strict=True)
            )
            return F.layer_norm(
                values[0], part.normalized_shape, weights.get("weight"), weights.get("bias"), part.eps
            )
        if node.op == "reshape":
            return values[0].reshape(self.local_shape(node, after))
        if node.op == "loss":
            return self._loss(node, seen.node, values)
        if node.op == "mean":
            count: int = prod(self.nodes[node.inputs[0]].shape[d] for d in node.attrs["dims"])
            return torch.sum(values[0], node.attrs["dims"], keepdim=node.attrs["keep"]) / count
        if node.op in ("dropout", "piece"):
            with self._randomness(node, after):
                return self._plainly(seen.node, part, values)
        return self._plainly(seen.node, part, values)

    def _plainly(self, n: fx.Node, part: Any, values: list[Tensor]) -> Tensor:
        """A module or function of the script's own, on local tensors."""
        if part is not None:
            made: Tensor = part(*values[: len(values) - len(list(part.parameters()))])
            return made
        return self._call(n, values)

    def _loss(self, node: Node, n: fx.Node, values: list[Tensor]) -> Tensor:
        """A summand of the whole batch's loss: local sums over the global count."""
        target: Any = n.target
        shape = self.nodes[node.inputs[1]].shape
        if not values[1].is_floating_point() and bool((values[1] < 0).any()):
            raise RunError("a target is negative (ignored); a mean over the others is not planned for.")
        total: Tensor = target(values[0], values[1], reduction="sum")
        return total / prod(shape) if node.attrs["reduction"] == "mean" else total

    @contextmanager
    def _randomness(self, node: Node, after: str) -> Iterator[None]:
        """Dropout: the same for all where all have the tensor, different where they have different parts."""
        with torch.random.fork_rng(devices=[]):
            place = list(self.nodes).index(node.name)
            own = self.rank + 1 if after != "I" else 0
            torch.manual_seed(((self.seed * 1_000_003 + self.steps) * 10_007 + place) * 4099 + own)
            yield

    def _call(self, n: fx.Node, values: list[Tensor]) -> Tensor:
        """Any other function, with its tensors in the order in which they were seen."""
        _target, source = n.target, n.args[0] if n.args else None
        if isinstance(source, fx.Node) and source not in self.traced.names:  # a piece of a chunked tensor
            chunks = self._evaluate(source, values)
            picked: Tensor = chunks[n.args[1]]
            return picked
        made: Tensor = self._evaluate(n, values)
        return made

    def _evaluate(self, n: fx.Node, values: Iterable[Tensor]) -> Any:
        left = iter(values)
        known, plain = self.traced.names, self.traced.plain
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda a: next(left) if a in known else plain[a])
        target: Any = n.target
        return (
            getattr(args[0], target)(*args[1:], **kwargs)
            if n.op == "call_method"
            else target(*args, **kwargs)
        )

    # -- after backward -----------------------------------------------------------------------

    def replicated(self) -> list[nn.Parameter]:
        """Parameters that all ranks have; those that no instruction uses have no gradient either."""
        placed = self.plan.program.placements
        return [self.parameters[name] for name in placed if placed[name] == "I"]

    def add_up(self) -> None:
        """Make the gradients of replicated parameters whole: every rank has a summand."""
        works = []
        for parameter in self.replicated():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                works.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in works:
            work.wait()

    def norm(self) -> float:
        """Of the whole gradient: cut parameters added up over ranks, replicated ones counted once."""
        placed = self.plan.program.placements
        cut_up = sum(_square(self.parameters[name]) for name, held in placed.items() if held != "I")
        told = torch.tensor([cut_up], dtype=torch.float64)
        dist.all_reduce(told)
        return float((told + sum(_square(p) for p in self.replicated())).sqrt())

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters, or their gradients, put together from all ranks."""
        made = {}
        for name, value in tensors.items():
            dim = dim_of(self.plan.program.placements.get(name, "I"))
            if dim is not None:
                value = gather_pieces(value, dim, self.lengths(name, dim, self._segments[name]))
            made[name] = value.detach().clone()
        return made


def _nothing(shape: list[int], values: list[Tensor]) -> Tensor:
    """What comes of an empty slice, where torch refuses to compute it: still part of the graph, because
    the other ranks' backward passes meet this one's."""
    return torch.zeros(shape, dtype=values[0].dtype) + sum(value.sum() for value in values) * 0


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def _square(parameter: nn.Parameter) -> float:
    return 0.0 if parameter.grad is None else float(parameter.grad.double().square().sum())
