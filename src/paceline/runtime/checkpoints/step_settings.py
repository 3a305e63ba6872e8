"""Settings of parameter groups that an optimizer's own step changes: a count of its steps, say.

They are part of what it remembers, beside its state: a run that goes on has to have them. What a script or a
scheduler sets between steps is not, and neither is a learning rate: a resumed script sets these anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.store.optimizers import PLAIN

SET_BETWEEN = ("params", "param_names", "lr", "initial_lr")
GROUP = "group"
"""What begins the name of such a setting among an optimizer's plain values; its group's number follows."""


class StepSettings:
    """One worker's."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._names: set[str] = set()

    @contextmanager
    def watched(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """In here it steps. Those of torch keep such things in their state."""
        if getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer):
            yield
            return
        before = [_kept(group) for group in optimizer.param_groups]
        yield
        for was, group in zip(before, optimizer.param_groups, strict=True):
            now = _kept(group)
            self._names |= {name for name, value in now.items() if was.get(name) != value}
            self._mention_others(was, now)

    def _mention_others(self, was: dict[str, Any], now: dict[str, Any]) -> None:
        """Say once what cannot be kept."""
        other = next((n for n, v in now.items() if isinstance(v, _Other) and v != was.get(n)), None)
        if other is not None:
            self._say(
                f"the optimizer's step changes its group setting {other!r}, which is neither a number nor a "
                "text: a resume will not have it. Keep it in optimizer.state"
            )

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What they are now, as plain values."""
        found: dict[str, Any] = {}
        for number, group in enumerate(optimizer.param_groups):
            kept = {name: value for name, value in _kept(group).items() if name in self._names}
            plain = {name: value for name, value in kept.items() if not isinstance(value, _Other)}
            found |= {f"{GROUP}{number}.{name}": value for name, value in plain.items()}
        return found

    def give(self, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> dict[str, Any]:
        """Put them back; what is left of the plain values is the optimizer's state."""
        rest: dict[str, Any] = {}
        for name, value in values.items():
            place, key = name.split(".", 1)
            if not place.startswith(GROUP):
                rest[name] = value
                continue
            self._names.add(key)
            number = int(place.removeprefix(GROUP))
            if number < len(optimizer.param_groups):
                _set(optimizer.param_groups[number], key, value)
        return rest


class _Other:
    """Stands for a value that cannot be kept: equal as long as it is the same object, not written to."""

    def __init__(self, value: Any) -> None:
        self._value, self._version = value, getattr(value, "_version", 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Other) and self._value is other._value and self._version == other._version

    __hash__ = None  # type: ignore[assignment]


def _kept(group: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in group.items() if name not in SET_BETWEEN}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if _all_plain(value) else _Other(value)


def _all_plain(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(each, PLAIN) for each in value)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """In the form that it has."""
    old = group.get(key)
    if isinstance(old, Tensor):
        value = torch.full_like(old, value)
    group[key] = tuple(value) if isinstance(old, tuple) else value
