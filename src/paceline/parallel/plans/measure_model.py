"""Measures a model: bytes, flops and times of its operators, for several batch sizes.

Parameters, gradients and optimizer state are counted; what backward needs is seen as autograd saves it;
times are medians of every operator alone, on the inputs it really gets. Between the operators is what the
whole step takes beyond their sum. The loss is the script's own affair and is not part of it."""

from __future__ import annotations

import inspect
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import ConfigError
from paceline.parallel.plans.capture import Captured, with_batch
from paceline.plan.profile.model import REST, ModelProfile, Operator, fit

REPEATS = 5
LONG_S = 1.0
"""What takes longer than this is timed twice only."""
Progress = Callable[[str, float], None]
Calls = dict[str, list[tuple[Any, Any]]]


def operators_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that own parameters, by name, in the order of the model's definition."""
    owners = {name: part for name, part in model.named_modules() if _owns(part)}
    nested = (nn.MultiheadAttention, nn.RNNBase)
    inside = {
        name
        for name in owners
        for other, part in owners.items()
        if isinstance(part, nested) and name.startswith(f"{other}.")
    }
    return {name: part for name, part in owners.items() if name not in inside}


def loose(part: nn.Module) -> bool:
    """Whether a module has parameters of its own beside layers that have theirs: those are no operator."""
    return any(_owns(child) for child in part.children()) and not isinstance(part, nn.MultiheadAttention)


def _owns(part: nn.Module) -> bool:
    return any(True for _ in part.parameters(recurse=False))


class Holds(NamedTuple):
    """An operator and the parameters that count as its own."""

    part: nn.Module
    own: list[nn.Parameter]
    shardable: bool

    @property
    def size_bytes(self) -> int:
        """Of all of them."""
        return sum(p.numel() * p.element_size() for p in self.own)


def held_by(model: nn.Module) -> dict[str, Holds]:
    """Operators by name. A parameter that several share (tied weights) is the first one's and stays whole:
    sharded twice, it would be two parameters."""
    parts = operators_of(model)
    every = {name: list(part.parameters(recurse=not loose(part))) for name, part in parts.items()}
    uses = Counter(id(p) for own in every.values() for p in {id(p): p for p in own}.values())
    seen: set[int] = set()
    made = {}
    for name, part in parts.items():
        own = [p for p in every[name] if id(p) not in seen]
        seen |= {id(p) for p in own}
        made[name] = Holds(part, own, not loose(part) and all(uses[id(p)] == 1 for p in every[name]))
    return made


def measure_model(
    captured: Captured, name: str, progress: Progress = lambda what, share: None
) -> ModelProfile:
    """The profile of a script's model, on one thread: as workers that share a machine have it."""
    torch.set_num_threads(1)
    model, parts = captured.model.train(), operators_of(captured.model)
    if not parts:
        raise ConfigError("the model has no parameters, so there is nothing to plan.")
    top = captured.batch
    batches = sorted({max(1, top // 4), max(1, top // 2), top})
    progress("counting", 0.0)
    flops, saved = _counted(captured, parts)
    times: dict[str, list[float]] = defaultdict(list)
    for i, batch in enumerate(batches):
        for op, seconds in _times(captured, parts, batch).items():
            times[op].append(seconds)
        progress("timing", (i + 1) / len(batches))
    whole = [sum(times[op][i] for op in times) for i in range(len(batches))]
    operators = [
        _operator(op, holds, flops[op] / top, saved[op] / top, fit(batches, times[op]))
        for op, holds in held_by(model).items()
    ]
    fixed, each = fit(batches, times[REST])
    rest = Operator(
        name=REST,
        kind="rest",
        activation_bytes=saved[REST] / top,
        flops=flops[REST] / top,
        fixed_s=fixed,
        per_sample_s=each,
    )
    model.zero_grad(set_to_none=True)
    return ModelProfile(
        model=name,
        operators=(*operators, rest),
        optimizer=type(captured.optimizer).__name__,
        state_copies=state_copies(captured.optimizer),
        batches=tuple(batches),
        flops_per_s=3 * sum(flops.values()) / whole[-1] if sum(flops.values()) else None,
        source="measured",
    )


def _operator(name: str, holds: Holds, flops: float, saved: float, times: tuple[float, float]) -> Operator:
    part, own = holds.part, holds.own
    return Operator(
        name=name,
        kind=type(part).__name__,
        parameter_bytes=holds.size_bytes,
        frozen_bytes=sum(p.numel() * p.element_size() for p in own if not p.requires_grad),
        activation_bytes=saved,
        flops=flops,
        fixed_s=times[0],
        per_sample_s=times[1],
        max_slices=part.in_features if type(part) is nn.Linear and holds.shardable else 1,
        shardable=holds.shardable,
    )


def state_copies(optimizer: torch.optim.Optimizer) -> float:
    """What the optimizer remembers for each parameter, in units of it: seen on a small one of its kind."""
    probe = nn.Parameter(torch.zeros(64, 64))
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    settings = {
        key: value for key, value in optimizer.param_groups[0].items() if key in taken and key != "params"
    }
    twin: Any = kind([probe], **settings)
    probe.grad = torch.ones_like(probe)
    twin.step()
    states = [s for s in twin.state[probe].values() if isinstance(s, Tensor)]
    return sum(s.numel() for s in states) // probe.numel()


# -- counting ---------------------------------------------------------------------------------


def _counted(captured: Captured, parts: dict[str, nn.Module]) -> tuple[dict[str, float], dict[str, float]]:
    """Forward flops, and the bytes kept for backward, of every operator and of the rest."""
    flops: dict[str, float] = defaultdict(float)
    saved: dict[str, float] = defaultdict(float)
    at: list[str] = [REST]
    seen = {p.untyped_storage().data_ptr() for p in captured.model.parameters()}
    counter = FlopCounterMode(display=False)
    marks: list[float] = []

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()
        if place.data_ptr() not in seen:
            seen.add(place.data_ptr())
            saved[at[-1]] += place.nbytes()
        return tensor

    def enter(name: str) -> None:
        at.append(name)
        marks.append(counter.get_total_flops())

    def leave(name: str) -> None:
        flops[at.pop()] += counter.get_total_flops() - marks.pop()

    args, kwargs = with_batch(captured, captured.batch)
    with _watched(parts, enter, leave), counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = captured.model(*args, **kwargs)
    flops[REST] = counter.get_total_flops() - sum(flops.values())
    del output
    return flops, saved


@contextmanager
def _watched(
    parts: dict[str, nn.Module], enter: Callable[[str], None], leave: Callable[[str], None]
) -> Iterator[None]:
    handles = []
    for name, part in parts.items():
        if not loose(part):
            handles.append(part.register_forward_pre_hook(lambda *_, name=name: enter(name)))
            handles.append(part.register_forward_hook(lambda *_, name=name: leave(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# -- timing -----------------------------------------------------------------------------------


def _times(captured: Captured, parts: dict[str, nn.Module], batch: int) -> dict[str, float]:
    """Seconds of forward and backward: every operator alone, and what the whole takes beyond them."""
    args, kwargs = with_batch(captured, batch)
    calls = _calls(captured.model, parts, args, kwargs)
    times = {name: sum(_median(part, *call) for call in calls.get(name, [])) for name, part in parts.items()}
    whole = _median(captured.model, args, kwargs)
    return times | {REST: max(0.0, whole - sum(times.values()))}


def _calls(model: nn.Module, parts: dict[str, nn.Module], args: Any, kwargs: Any) -> Calls:
    calls: Calls = defaultdict(list)
    handles = [
        part.register_forward_pre_hook(
            lambda _, a, k, name=name: calls[name].append((_alone(a), _alone(k))), with_kwargs=True
        )
        for name, part in parts.items()
        if not loose(part)
    ]
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _alone(values: Any) -> Any:
    """Tensors that begin a graph of their own."""
    return tree_map(
        lambda v: v.detach().requires_grad_(v.is_floating_point()) if isinstance(v, Tensor) else v, values
    )


def _both_ways(part: nn.Module, args: Any, kwargs: Any) -> None:
    outputs = [o for o in tree_leaves(part(*args, **kwargs)) if isinstance(o, Tensor) and o.requires_grad]
    if outputs:
        torch.autograd.backward(outputs[:1], [torch.ones_like(outputs[0])])


def _median(part: nn.Module, args: Any, kwargs: Any) -> float:
    _both_ways(part, args, kwargs)
    times: list[float] = []
    while len(times) < REPEATS and not (len(times) > 1 and sum(times) > LONG_S):
        began = time.perf_counter()
        _both_ways(part, args, kwargs)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
