"""Which correction a run gets: what was asked for, as far as protocol and optimizer let it make sense."""

from __future__ import annotations

from typing import NamedTuple

from paceline.corrections import AUTO, DANA, NONE, parse_correction
from paceline.errors import ConfigError
from paceline.store.corrections.dana import ADAMS
from paceline.store.layout import Layout
from paceline.store.optimizers import OptimizerSpec

DEFAULT = DANA
"""What `auto` means where gradients are stale and the optimizer has a momentum."""
REAL = ("torch.float16", "torch.bfloat16", "torch.float32", "torch.float64")


class Choice(NamedTuple):
    """The correction, and what people should know about it."""

    name: str
    remark: str = ""


def choose(asked: str, protocol: str, lockstep: bool, spec: OptimizerSpec, layout: Layout) -> Choice:
    """`asked` by the command or the script."""
    named, unsuited = parse_correction(asked), _unsuited(spec, layout)
    if asked == NONE or (asked == AUTO and lockstep):
        return Choice(NONE)
    if lockstep:
        why = f"under {protocol!r} no worker computes while weights change, so no gradient is stale"
        return Choice(NONE, f"--correct {asked} is ignored: {why}")
    if asked == AUTO:
        return (
            Choice(NONE, f"stale gradients are not corrected: {unsuited}") if unsuited else _automatic(spec)
        )
    if not _is_real(layout):
        raise ConfigError(f"--correct {asked} is for real numbers, and a parameter is not. {_instead(asked)}")
    if named.dana and unsuited and not _has_no_momentum(spec):
        raise ConfigError(
            f"--correct {asked} gives every worker a momentum, but {unsuited}. {_instead(asked)}"
        )
    if asked == DANA and unsuited:
        return Choice(NONE, f"--correct dana changes nothing: {unsuited}")
    return Choice(asked, _nadam(spec) if named.dana else "")


def nothing_stale(asked: str) -> Choice:
    """Where workers step by themselves, and the store only adds (`--apply increments`)."""
    if asked not in (AUTO, NONE):
        raise ConfigError(
            f"--correct {asked} corrects gradients, but with --apply increments the store sees none: workers "
            "step by themselves. Leave one of them out."
        )
    return Choice(
        NONE, "stale gradients are not corrected: workers step by themselves" if asked == AUTO else ""
    )


def _automatic(spec: OptimizerSpec) -> Choice:
    return Choice(
        DEFAULT,
        f"correcting stale momentum with {DEFAULT.upper()} (turn off: --correct none){_nadam(spec)}",
    )


def _nadam(spec: OptimizerSpec) -> str:
    if spec.name != "NAdam":
        return ""
    return ". NAdam's look-ahead is what workers are given, and its momentum_decay is not used"


def _instead(asked: str) -> str:
    return f"Leave --correct {asked} out, or use --correct gap or dc." if "dana" in asked else "Leave it out."


def _unsuited(spec: OptimizerSpec, layout: Layout) -> str:
    """Why a momentum per worker cannot take this optimizer's place; empty: it can."""
    if any(group.number for group in spec.groups):
        return "the script has several optimizers"
    if not _is_real(layout):
        return "some parameters are not real numbers"
    if spec.name in ADAMS:
        strict = any(group.settings.get("amsgrad") for group in spec.groups)
        return f"{spec.name} with amsgrad keeps the largest second moment" if strict else ""
    if spec.name != "SGD":
        return f"{spec.name} has no momentum that could be each worker's own"
    if _has_no_momentum(spec):
        return "SGD has no momentum here"
    damped = any(group.settings.get("dampening") for group in spec.groups)
    return "SGD has dampening here" if damped else ""


def _has_no_momentum(spec: OptimizerSpec) -> bool:
    return spec.name == "SGD" and not any(group.settings.get("momentum") for group in spec.groups)


def _is_real(layout: Layout) -> bool:
    return all(slot.dtype in REAL for slot in layout.trained)
