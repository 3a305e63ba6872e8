"""An optimizer as plain data: what it takes to build the same one in the store.

Nothing is unpickled: a class name out of `torch.optim`, numbers and strings per parameter group,
and (for a checkpoint) tensors. So any optimizer of `torch.optim` works that needs no closure and
no sparse gradients; a class of somebody else's does not, and is refused with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.store.together import Together, title

GroupSettings = dict[str, Any]
UNSUITED = {
    "LBFGS": "it evaluates the loss several times per step",
    "SparseAdam": "it needs sparse gradients",
}
PLAIN = (bool, int, float, str)


class OptimizerGroup(msgspec.Struct, frozen=True):
    """One parameter group: which trained parameters, with which settings."""

    parameters: tuple[int, ...]
    settings: GroupSettings
    kind: str = ""
    """The optimizer's class, where several are of more than one."""
    number: int = 0
    """Which of several optimizers has it."""


class OptimizerSpec(msgspec.Struct, frozen=True):
    """A torch optimizer by name."""

    name: str
    groups: tuple[OptimizerGroup, ...]


def check_suited(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what takes no step with a gradient that lies in flat memory: neither a store nor a peer can."""
    if isinstance(optimizer, Together):
        for part in optimizer.optimizers:
            check_suited(part)
    name = type(optimizer).__name__
    if name in UNSUITED:
        raise ConfigError(
            f"optimizer {name} cannot run on several workers: {UNSUITED[name]}. Use another optimizer."
        )


def describe_optimizer(optimizer: torch.optim.Optimizer, index: dict[int, int]) -> OptimizerSpec:
    """Take an optimizer apart. `index` maps id(parameter) to its place among the trained ones."""
    if isinstance(optimizer, Together):
        return _describe_all(optimizer, index)
    name = type(optimizer).__name__
    check_suited(optimizer)
    if getattr(torch.optim, name, None) is not type(optimizer):
        raise ConfigError(
            f"optimizer {type(optimizer).__module__}.{name} is not one of torch.optim. "
            "The store rebuilds optimizers by name and loads no foreign code. Use one of torch.optim, or let "
            "the script's own optimizer step in its worker: with --apply increments, or with a protocol that "
            "has no store (--protocol allreduce or local_sgd)."
        )
    settings = group_settings(optimizer)
    places = [
        tuple(index[id(p)] for p in group["params"] if id(p) in index) for group in optimizer.param_groups
    ]
    return OptimizerSpec(name, tuple(OptimizerGroup(p, s) for p, s in zip(places, settings, strict=True)))


def _describe_all(several: Together, index: dict[int, int]) -> OptimizerSpec:
    specs = [describe_optimizer(part, index) for part in several.optimizers]
    groups = [
        OptimizerGroup(group.parameters, group.settings, spec.name, number)
        for number, spec in enumerate(specs)
        for group in spec.groups
    ]
    return OptimizerSpec(title(several), tuple(groups))


def group_settings(optimizer: torch.optim.Optimizer) -> list[GroupSettings]:
    """The settings of every group as they are now: schedulers change them between steps."""
    return [
        {key: _plain(key, value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def build_optimizer(spec: OptimizerSpec, parameters: list[Tensor], fast: bool) -> torch.optim.Optimizer:
    """The same optimizer over the store's own parameters.

    With `fast` the fused kernels are used unless the user chose otherwise: on CPU they are several
    times faster, and may differ from the plain ones in the last bit. Not for 16-bit weights: there
    torch's fused SGD moves only the last few elements of a tensor (seen in 2.13 on CPU).
    """
    if len({group.kind for group in spec.groups}) > 1:
        return _build_all(spec, parameters, fast)
    cls: Any = getattr(torch.optim, spec.name, None)
    if not _is_optimizer(cls) or spec.name in UNSUITED:
        raise ConfigError(f"torch.optim has no optimizer {spec.name!r} that the store can run.")
    known = inspect.signature(cls).parameters
    groups = []
    for group in spec.groups:
        settings = _retupled(group.settings)
        members = [parameters[i] for i in group.parameters]
        wide = all(p.dtype in (torch.float32, torch.float64) for p in members)
        free = settings.get("fused") is None and not settings.get("foreach")
        if fast and wide and free and "fused" in known:
            settings |= {"fused": True, "foreach": None}
        groups.append({"params": members, **settings})
    defaults = {k: v for k, v in groups[0].items() if k in known and k != "params"}
    optimizer: torch.optim.Optimizer = cls(groups, **defaults)
    return optimizer


def _build_all(spec: OptimizerSpec, parameters: list[Tensor], fast: bool) -> Together:
    """One for each of the script's: they are of different classes."""
    made = []
    for number in sorted({group.number for group in spec.groups}):
        own = tuple(
            OptimizerGroup(g.parameters, g.settings, g.kind, number)
            for g in spec.groups
            if g.number == number
        )
        made.append(build_optimizer(OptimizerSpec(own[0].kind, own), parameters, fast))
    return Together(made)


def apply_settings(optimizer: torch.optim.Optimizer, settings: list[GroupSettings]) -> None:
    """Take over what a worker's scheduler decided."""
    for group, new in zip(optimizer.param_groups, settings, strict=True):
        for key, value in _retupled(new).items():
            if key not in ("fused", "foreach", "capturable", "differentiable"):
                group[key] = value


def adjust(settings: list[GroupSettings], factors: Mapping[str, float]) -> list[GroupSettings]:
    """The settings with factors on them. `momentum` is a group's momentum, or the first of Adam's betas."""
    if set(factors.values()) <= {1.0}:
        return settings
    return [_adjusted(group, factors) for group in settings]


def _adjusted(group: GroupSettings, factors: Mapping[str, float]) -> GroupSettings:
    changed = dict(group)
    for name, factor in factors.items():
        if name == "momentum" and "betas" in group:
            first, *others = group["betas"]
            changed["betas"] = [first * factor, *others]
        elif name in group:
            changed[name] = group[name] * factor
    return changed


def export_state(
    optimizer: torch.optim.Optimizer, *, copied: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimizer state as named tensors and plain values, in the order of the parameters.

    `copied`: whether its tensors are nobody else's, and need no copy."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                whole = value.contiguous()
                tensors[f"{index}.{key}"] = whole if copied else whole.clone()
            else:
                values[f"{index}.{key}"] = value
    return tensors, values


def import_state(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], values: dict[str, Any]
) -> None:
    """Put exported state back; what is not in it is forgotten."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **values}.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _is_optimizer(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)


def _plain(key: str, value: Any) -> Any:
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(key, v) for v in value]
    raise ConfigError(
        f"optimizer setting {key}={value!r} cannot be sent to the store: use numbers or strings."
    )


def _retupled(settings: GroupSettings) -> GroupSettings:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
