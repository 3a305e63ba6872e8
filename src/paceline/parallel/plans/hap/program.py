"""Carries a HAP program out on one rank: real tensors, cut by the plan's ratios, connected by uneven
collectives.

Backward is autograd's: every collective has its adjoint. What is left to do after it is to add up the
gradients of replicated parameters (`add_up`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import ConfigError, RunError
from paceline.parallel.plans.hap.compute import HapComputing
from paceline.parallel.plans.hap.emulated_device import EmulatedDevice
from paceline.parallel.plans.hap.uneven import (
    AllGather,
    Collect,
    ReduceScatter,
    Slice,
    UnevenAllReduce,
    UnevenAllToAll,
    add_up_gradients,
    cut,
    gather_pieces,
    same_on_all,
)
from paceline.plan.hap.graph import Node
from paceline.plan.hap.plan import HapPlan
from paceline.plan.hap.program import Instruction
from paceline.plan.hap.rules import dim_of, granules, round_lengths
from paceline.plan.hap.trace import Traced, by_position


class HapProgram:
    """A model as this rank computes it. Cuts the model's parameters in place."""

    def __init__(
        self,
        model: nn.Module,
        traced: Traced,
        plan: HapPlan,
        seed: int = 0,
        device: EmulatedDevice | None = None,
    ) -> None:
        """`device`: emulated, if its time is not this process's own."""
        self.model, self.traced, self.plan = model, traced, plan
        self.graph = traced.graph.parts(plan.segments)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._check()
        self.nodes, self.sizes = self.graph.by_name(), granules(self.graph)
        self.parameters = dict(model.named_parameters())
        self.computing = HapComputing(model, traced, self.nodes, self.local_shape, seed)
        self._batches = 0
        """A number that tells apart what was computed so far."""
        self._device, self._forward = device, model.forward
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns: of several results the planned one, the others only in name."""
        if not self.model.training:
            raise ConfigError(
                "the planned model was called in eval mode. Give pace.evaluate() a function instead; it sees "
                "whole weights."
            )
        inputs = self._tensors(by_position(self._forward, args, kwargs))
        for value in inputs:
            self._batches = crc32(_bytes(value), self._batches)
        made = self._run(inputs)
        place, others = self.traced.place, self.traced.others
        return made if place is None else (*others[:place], made, *others[place + 1 :])

    def _tensors(self, args: tuple[Any, ...]) -> list[Tensor]:
        """The inputs of a call, if it is the planned one."""
        plain = tuple(None if isinstance(value, Tensor) else value for value in args)
        given = [value for value in args if isinstance(value, Tensor)]
        shapes = [tuple(value.shape) for value in given]
        if plain != self.traced.plain_args or shapes != [node.shape for node in self._inputs]:
            raise ConfigError(
                f"the plan is for inputs of shape {[node.shape for node in self._inputs]}, got {shapes}. "
                "All batches and calls must have the same shapes."
            )
        return given

    def _run(self, args: list[Tensor]) -> Tensor:
        self.computing.steps += 1
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
            result = _apply(UnevenAllReduce, value)
        elif each.kind == "all_to_all":
            assert before is not None
            assert after is not None
            old, new = (self.lengths(each.tensor, d, each.segment) for d in (before, after))
            result = _apply(UnevenAllToAll, value, before, old, after, new)
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
        dim = dim_of(each.before[0])
        lengths = [] if dim is None else self.lengths(each.tensor, dim, each.segment)
        made: Any = _apply(Collect, value, each.before[0], lengths, each.variant)
        whole: Tensor = made
        return whole

    # -- computing ----------------------------------------------------------------------------

    def _compute(
        self, each: Instruction, held: dict[tuple[str, str], Tensor], given: dict[str, Tensor]
    ) -> Tensor:
        node = self.nodes[each.tensor]
        values = [
            self._fetch(name, wanted, each.segment, held, given)
            for name, wanted in zip(node.inputs, each.before, strict=True)
        ]
        if self._device is None:
            return self.computing.carry_out(node, values, each.after)
        return self._device.spend(
            node.flops * self._share(node, each),
            values,
            lambda inputs: self.computing.carry_out(node, inputs, each.after),
        )

    def _share(self, node: Node, each: Instruction) -> float:
        """Of an operation's work, what is this rank's."""
        for name, held in [(node.name, each.after), *zip(node.inputs, each.before, strict=True)]:
            if (dim := dim_of(held)) is not None:
                return self.lengths(name, dim, each.segment)[self.rank] / self.nodes[name].shape[dim]
        return 1.0

    def local_shape(self, node: Node, held: str) -> list[int]:
        """Of a result, on this rank."""
        shape, dim = list(node.shape), dim_of(held)
        if dim is not None:
            shape[dim] = self.lengths(node.name, dim, node.segment)[self.rank]
        return shape

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

    # -- after backward -----------------------------------------------------------------------

    def replicated(self) -> list[nn.Parameter]:
        """Parameters that all ranks have; those that no instruction uses have no gradient either."""
        placed = self.plan.program.placements
        return [self.parameters[name] for name in placed if placed[name] == "I"]

    def add_up(self) -> None:
        """Make the gradients of replicated parameters whole: every rank has a summand, of the same batch."""
        batches_alike = same_on_all(self._batches)
        add_up_gradients([p for p in self.replicated() if p.requires_grad])
        if not batches_alike():
            raise ConfigError(
                "workers gave the model different batches, but under HAP all workers compute one batch "
                "together. Use the same data and the same random numbers on all: do not seed by rank, and "
                "do not draw on one rank only."
            )

    def norm(self, parameters: Iterable[Tensor] | None = None) -> float:
        """Of the whole gradient: cut parameters added up over ranks, replicated ones counted once."""
        placed, cut_up, whole = self.plan.program.placements, 0.0, 0.0
        wanted = None if parameters is None else {id(p) for p in parameters}
        for name, parameter in self.parameters.items():
            if wanted is None or id(parameter) in wanted:
                if placed.get(name, "I") == "I":
                    whole += _square(parameter)
                else:
                    cut_up += _square(parameter)
        told = torch.tensor([cut_up], dtype=torch.float64)
        dist.all_reduce(told)
        return float((told + whole).sqrt())

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters, or their gradients, put together from all ranks."""
        made = {}
        for name, value in tensors.items():
            dim = dim_of(self.plan.program.placements.get(name, "I"))
            if dim is not None:
                value = gather_pieces(value, dim, self.lengths(name, dim, self._segments[name]))
            made[name] = value.detach().clone()
        return made


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def _bytes(value: Tensor) -> Any:
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy()


def _square(parameter: nn.Parameter) -> float:
    return 0.0 if parameter.grad is None else float(parameter.grad.double().square().sum())
