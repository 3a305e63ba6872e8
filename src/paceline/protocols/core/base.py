"""What a paced protocol is: a rule that reads the clock table and returns a verdict.

A protocol only decides. It reads no clock, opens no socket, starts no thread and imports no torch, so real
training, the simulator and the tests use the same object.

A protocol is a dataclass. Its `init` fields are its settings, each with its docstring below. Its
`field(init=False)` fields are its memory, keyed by worker; a checkpoint saves them. A field of type
`list[Pacing]` holds inner rules, each with its own memory.
"""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from paceline.protocols.core.clocks import Clocks


class Fate(StrEnum):
    """What happens to the gradient that was just pushed."""

    APPLY = "apply"
    """Make one optimizer step with it now."""
    HOLD = "hold"
    """Keep it for a later flush."""
    DROP = "drop"
    """Forget it; its work counts as done."""


class Flush(StrEnum):
    """How the held gradients become one optimizer step."""

    MEAN = "mean"
    """Their mean, weighted by the samples behind each: a whole step."""
    PART = "part"
    """Their mean, with a step scaled by their number divided by the number of active workers."""
    SUM = "sum"
    """Their sum; each counts as much of a step as if it were applied alone."""


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The answer to one event. Carried out in this order: the gradient, the flush, the bench, the
    rebase, the releases."""

    fate: Fate = Fate.APPLY
    flush: Flush | None = None
    release: tuple[int, ...] = ()
    weight: float = 1.0
    """The pushed gradient's share in a flush."""
    lr_scale: float = 1.0
    """Scales the step, not the gradient, because scaling a gradient does not change a step of Adam."""
    ask_again_s: float | None = None
    """Ask the protocol again after this many seconds even if nothing happens."""
    bench: tuple[int, ...] = ()
    """Waiting workers to set aside: not released, and not active until a later verdict releases them."""
    rebase: bool = False
    """Set all active workers to the same clock, because a new phase begins."""
    adjust: dict[str, float] | None = None
    """Factors on the optimizer's settings from the next step on, as `{"momentum": 0.125}`. Settings not named
    keep their last factor."""
    note: str = ""
    """A message for the user."""


@runtime_checkable
class Pacing(Protocol):
    """The rule of a paced protocol."""

    lockstep: ClassVar[bool]
    """True if no worker computes while weights change. All workers may then read one buffer."""

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        """Decide about a push or, with None, about a change of membership or a timer."""
        ...


def memory(protocol: Pacing) -> dict[str, Any]:
    """A protocol's memory, including that of inner rules, ready to be saved as JSON."""
    hints = _memory_types(type(protocol))
    names = [f.name for f in fields(protocol) if not f.init]  # type: ignore[arg-type]
    return {name: _saved(getattr(protocol, name), hints[name]) for name in names}


def restore(protocol: Pacing, saved: dict[str, Any]) -> None:
    """Restore a memory that `memory` returned."""
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
