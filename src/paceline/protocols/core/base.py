"""What a paced protocol is: a rule that reads the clock table and returns a verdict.

A protocol only decides. It reads no clock, opens no socket, starts no thread and imports no torch,
so that real training, the simulator and the tests drive the very same object.

A protocol is a dataclass. Its `init` fields are its settings, each with its docstring below; its
`field(init=False)` fields are its memory, keyed by worker, and are what a checkpoint saves. One of
type `list[Pacing]` holds rules inside the rule, each with a memory of its own.
"""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from paceline.protocols.core.clocks import Clocks


class Fate(StrEnum):
    """What becomes of the gradient that was just pushed."""

    APPLY = "apply"
    """One optimizer step with it, now."""
    HOLD = "hold"
    """Keep it for a later flush."""
    DROP = "drop"
    """Forget it; its work counts as done."""


class Flush(StrEnum):
    """How the held gradients become one optimizer step."""

    MEAN = "mean"
    """Their mean, weighted by the samples behind each: a whole step."""
    PART = "part"
    """Their mean, but only as much of a step as they are of one gradient from every active worker."""
    SUM = "sum"
    """Their sum, each counting as much of a step as if it had been applied alone."""


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The answer to one event. Carried out in this order: the gradient, the flush, the bench, the
    rebase, the releases."""

    fate: Fate = Fate.APPLY
    flush: Flush | None = None
    release: tuple[int, ...] = ()
    weight: float = 1.0
    """The pushed gradient's share in a flush."""
    lr_scale: float = 1.0
    """Scales the step, not the gradient: Adam moves as far with a scaled gradient as without."""
    ask_again_s: float | None = None
    """Ask again after this many seconds even if nothing happens."""
    bench: tuple[int, ...] = ()
    """Waiting workers to set aside: not released, and not active until a later verdict releases them."""
    rebase: bool = False
    """Let all active workers have the same clock from now on: a new phase begins."""
    adjust: dict[str, float] | None = None
    """Factors on the optimizer's own settings, from the next step on, as `{"momentum": 0.125}`; what
    is not named stays as it was adjusted last."""
    note: str = ""
    """Something a person should read."""


@runtime_checkable
class Pacing(Protocol):
    """The rule of a paced protocol."""

    lockstep: ClassVar[bool]
    """True when nobody computes while weights change: all workers may then read one buffer."""

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        """Judge a push, or (None) a change of membership or a timer."""
        ...


def memory(protocol: Pacing) -> dict[str, Any]:
    """What a protocol remembers, ready to be saved as JSON; of rules inside it, what each remembers."""
    hints = _memory_types(type(protocol))
    names = [f.name for f in fields(protocol) if not f.init]  # type: ignore[arg-type]
    return {name: _saved(getattr(protocol, name), hints[name]) for name in names}


def restore(protocol: Pacing, saved: dict[str, Any]) -> None:
    """Give a protocol back what `memory` took from it."""
    hints = _memory_types(type(protocol))
    for name, value in saved.items():
        if hints[name] == list[Pacing]:
            for rule, part in zip(getattr(protocol, name), value, strict=True):
                restore(rule, part)
        else:
            object.__setattr__(protocol, name, msgspec.convert(value, hints[name], strict=False))


def _saved(value: Any, kind: Any) -> Any:
    if kind == list[Pacing]:
        return [memory(rule) for rule in value]
    return msgspec.to_builtins(value, str_keys=True)


def _memory_types(cls: type) -> dict[str, Any]:
    from typing import get_type_hints

    return get_type_hints(cls)
