"""Carries an OSDP plan out on a model: FSDP2 for what is sharded, plain tensors for what is replicated.

Every operator is sharded by a call of its own, bottom up, without one for the whole model: that would
take the replicated operators along. What is left plain is averaged by `average_replicated` after
backward. Mixed models need their own norm (`clip`): torch's takes either plain tensors or sharded ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paceline.errors import ConfigError
from paceline.parallel.plans.hap.uneven import add_up_gradients, same_on_all
from paceline.parallel.plans.measure_model import held_by, operators_of
from paceline.parallel.plans.split import SplitLinear
from paceline.plan.osdp.plan import OsdpPlan


@dataclass
class ShardedModel:
    """A model that a plan was carried out on."""

    model: nn.Module
    names: dict[str, list[str]]
    """Of every parameter as the script knows it: the names it has now, several if it was split."""
    called: list[int] = field(default_factory=list)
    """The sharded layers that were called since the last step, in order."""

    def __post_init__(self) -> None:
        layers = [part for part in self.model.modules() if isinstance(part, FSDPModule)]
        for place, layer in enumerate(layers):
            assert isinstance(layer, nn.Module)
            layer.register_forward_pre_hook(lambda *_, place=place: self.called.append(place))

    def average(self) -> None:
        """Gradients become those of the whole batch. FSDP2's collectives are matched by their order alone, so
        ranks that use sharded layers in different ways have mixed them up."""
        used_alike = same_on_all(self._used())
        average_replicated(self.model)
        self.called.clear()
        if not used_alike():
            raise ConfigError(
                "ranks used sharded layers differently in one step: others, in another order, or with a "
                "gradient on some ranks only, which mixes their weights up. Call all layers alike on all "
                "ranks, or plan with `paceline plan osdp --modes dp`."
            )

    def _used(self) -> int:
        """A number that tells apart how sharded layers were used since the last step."""
        sharded = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        return crc32(repr((self.called, [p.grad is None for p in sharded])).encode())

    def whole_state(self) -> dict[str, Tensor]:
        """All parameters and buffers, whole, under the script's own names. All ranks have to call it."""
        now = {name: _full(p) for name, p in self.model.named_parameters()}
        state = {
            name: now[parts[0]] if len(parts) == 1 else torch.cat([now[part] for part in parts], dim=1)
            for name, parts in self.names.items()
        }
        buffers = {name for name, _ in self.model.named_buffers()} & set(self.model.state_dict())
        return state | {name: b.detach().clone() for name, b in self.model.named_buffers() if name in buffers}


def check_plan(plan: OsdpPlan, model: nn.Module, workers: int) -> None:
    """Refuse a plan that was made for something else, and say what differs."""
    if plan.workers != workers:
        raise ConfigError(
            f"the plan is for {plan.workers} workers, but {workers} were started. Use --workers "
            f"{plan.workers}, or plan again with --workers {workers}."
        )
    every = held_by(model)
    here = {name: (type(h.part).__name__, h.size_bytes) for name, h in every.items() if h.size_bytes}
    planned = {op.name: (op.kind, op.parameter_bytes) for op in plan.operators if op.parameter_bytes}
    for name in [*planned, *here]:
        if planned.get(name) != here.get(name):
            raise ConfigError(
                f"the plan is for another model: operator {name!r} is {_told(planned.get(name))} in the plan "
                f"and {_told(here.get(name))} in the script. Plan again with `paceline plan osdp`."
            )
    for op in plan.operators:
        if op.parameter_bytes and op.mode != "dp" and not every[op.name].shardable:
            raise ConfigError(
                f"the plan shards {op.name!r}, whose parameters are no layer's own: tied to another's, or "
                "beside layers. Plan again with `paceline plan osdp`."
            )


def _told(operator: tuple[str, int] | None) -> str:
    return "missing" if operator is None else f"{operator[0]} of {operator[1]} bytes"


def shard(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, plan: OsdpPlan, mesh: DeviceMesh
) -> ShardedModel:
    """Do with every operator as planned; the optimizer, if any, then steps what its parameters have
    become."""
    check_plan(plan, model, mesh.size())
    before = list(model.named_parameters())
    _agree_on_start(model)
    names = {name: [name] for name, _ in before}
    parts = operators_of(model)
    for op in plan.operators:
        if op.parameter_bytes and op.mode != "dp":
            _apply(model, op.name, parts[op.name], op, mesh, names)
    if optimizer is not None:
        _hand_over(optimizer, before, model, names)
    return ShardedModel(model, names)


def _apply(
    model: nn.Module, name: str, part: nn.Module, op: Any, mesh: DeviceMesh, names: dict[str, list[str]]
) -> None:
    if op.slices == 1:
        fully_shard(part, mesh=mesh, reshard_after_forward=op.mode == "zdp")
        return
    assert isinstance(part, nn.Linear)
    split = SplitLinear(part, op.slices)
    model.set_submodule(name, split)
    for layer in list(split.slices)[: op.sharded]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    names[f"{name}.weight"] = [f"{name}.slices.{i}.weight" for i in range(op.slices)]


def _agree_on_start(model: nn.Module) -> None:
    """Everybody begins with rank 0's weights."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, 0)


def _hand_over(
    optimizer: torch.optim.Optimizer,
    before: list[tuple[str, nn.Parameter]],
    model: nn.Module,
    names: dict[str, list[str]],
) -> None:
    if optimizer.state:
        raise ConfigError(
            "the optimizer has stepped before prepare; its memory cannot be sharded. Prepare first, then "
            "train."
        )
    old = {id(parameter): name for name, parameter in before}
    new = dict(model.named_parameters())
    if any(id(p) not in old for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "the optimizer trains parameters that are not the model's, so no plan has them. Make them part "
            "of the model, and plan again."
        )
    for group in optimizer.param_groups:
        group["params"] = [new[name] for p in group["params"] for name in names[old[id(p)]]]


# -- a step -----------------------------------------------------------------------------------


def average_replicated(model: nn.Module) -> None:
    """Replace the gradients of replicated parameters by their mean over all ranks."""
    replicated = [p for p in model.parameters() if not isinstance(p, DTensor) and p.requires_grad]
    add_up_gradients(replicated)
    for parameter in replicated:
        if parameter.grad is not None:
            parameter.grad.div_(dist.get_world_size())


def global_norm(parameters: Iterable[Tensor]) -> float:
    """The norm of the whole gradient: sharded parts added up over ranks, replicated ones counted once."""
    sharded = replicated = 0.0
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            sharded += float(parameter.grad.to_local().double().square().sum())
        elif parameter.grad is not None:
            replicated += float(parameter.grad.double().square().sum())
    told = torch.tensor([sharded], dtype=torch.float64)
    dist.all_reduce(told)
    return math.sqrt(float(told) + replicated)


def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
