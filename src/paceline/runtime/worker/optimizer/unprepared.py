"""Notices optimizers that a script steps beside those that it has prepared; every `Pace` with others has one.

Nobody exchanges what they train, so it drifts apart between workers (the temperature of an actor and critic).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.store.together import parts_of

_NOT_THE_SCRIPTS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[3]))


class Unprepared:
    """One worker's look at every step of every optimizer in its process. Torch calls it before each."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        """Optimizers by identity: those that were prepared, declared, belong to such, or were told of."""
        self._kept: list[object] = []
        """What has these identities."""
        self._local: set[int] = set()
        """Parameters that were declared to be every worker's own."""
        self._prepared: Sequence[torch.optim.Optimizer] = ()
        self.paused: Callable[[], bool] = lambda: False

    def declare(self, objects: Sequence[object]) -> None:
        """These are meant to be every worker's own."""
        for each in objects:
            if isinstance(each, torch.optim.Optimizer):
                self._know(each)
            elif isinstance(each, nn.Module):
                self._local |= {id(p) for p in each.parameters()}
            elif isinstance(each, Tensor):
                self._local.add(id(each))
            self._kept.append(each)

    def watch(self, optimizer: torch.optim.Optimizer, say: Callable[[str], None]) -> Callable[[], None]:
        """Training begins with this one; what ends the watch."""
        self._say, self._prepared = say, parts_of(optimizer)
        for each in self._prepared:
            self._know(each)
        return register_optimizer_step_pre_hook(self).remove

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step."""
        if id(optimizer) in self._known or self.paused():
            return
        self._know(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not (self._belongs(optimizer) or all(id(p) in self._local for p in parameters)):
            self._tell(optimizer, sum(p.numel() for p in parameters))

    def _know(self, optimizer: torch.optim.Optimizer) -> None:
        self._known.add(id(optimizer))
        self._kept.append(optimizer)  # else another one might have its identity later

    def _belongs(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a prepared one has it inside, or it has a prepared one."""
        return any(_within(optimizer, each) or _within(each, optimizer) for each in self._prepared)

    def _tell(self, optimizer: torch.optim.Optimizer, numbers: int) -> None:
        name, where = _named(optimizer, sys._getframe(2))
        what = f"{type(optimizer).__name__} {name!r}" if name else type(optimizer).__name__
        self._say(
            f"the script steps {what}, which was not prepared ({numbers} numbers{where}): every worker "
            "trains what it has of them by itself, and they drift apart. Give it to pace.prepare() with the "
            "others, or say pace.local(optimizer) if every worker is to have its own"
        )


def _within(inner: torch.optim.Optimizer, outer: torch.optim.Optimizer) -> bool:
    return any(value is inner for value in vars(outer).values())


def _named(optimizer: object, frame: FrameType | None) -> tuple[str, str]:
    """What the script calls it, if that is a variable or an attribute, and the line that steps it."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPTS):
        frame = frame.f_back
    if frame is None:
        return "", ""
    owner = frame.f_locals.get("self")
    places = frame.f_locals, frame.f_globals, getattr(owner, "__dict__", {})
    name = next((n for place in places for n, value in place.items() if value is optimizer), "")
    return name, f", {Path(frame.f_code.co_filename).name} line {frame.f_lineno}"
