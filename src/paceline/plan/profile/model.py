"""A model's profile: its operators in order, with their bytes, flops and measured times.

An operator is a module that owns parameters (a layer). What runs between layers (activations, attention
without weights, the loss) is one operator of its own without parameters, named `(rest)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.errors import ConfigError
from paceline.plan.profile.files import checked, digest, read_table

REST = "(rest)"
"""The name of what runs between the operators."""
LEAST_VALUE = 1e-3
"""Of the largest value in a fit: smaller ones count no more than this one."""


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, as planners see it."""

    name: str
    kind: str = "module"
    parameter_bytes: int = 0
    frozen_bytes: int = 0
    """The part of the parameters that takes no gradient: neither gradients nor optimizer state."""
    activation_bytes: float = 0.0
    """Kept for backward, per sample."""
    flops: float = 0.0
    """Of the forward pass, per sample; backward counts twice as much."""
    fixed_s: float = 0.0
    """Seconds of forward and backward that do not depend on the batch."""
    per_sample_s: float = 0.0
    """Seconds of forward and backward for each sample."""
    max_slices: int = 1
    """Into how many slices the operator can be cut: a linear layer's input features, else 1."""
    shardable: bool = True
    """False for parameters that are no layer's own (a class token, say): they stay replicated."""

    def __post_init__(self) -> None:
        for field in (
            "parameter_bytes",
            "frozen_bytes",
            "activation_bytes",
            "flops",
            "fixed_s",
            "per_sample_s",
        ):
            value = getattr(self, field)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{field} of operator {self.name!r} must be a number >= 0, got {value}")
        if self.max_slices < 1:
            raise ValueError(
                f"max_slices of operator {self.name!r} must be at least 1, got {self.max_slices}"
            )

    def seconds(self, batch: int) -> float:
        """Forward and backward of a local batch."""
        return self.fixed_s + self.per_sample_s * batch


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What `paceline profile SCRIPT` writes."""

    model: str
    operators: tuple[Operator, ...]
    optimizer: str = "AdamW"
    state_copies: float = 2.0
    """Optimizer state in units of the trained parameters: 0 for plain SGD, 1 with momentum, 2 for Adam."""
    batches: tuple[int, ...] = ()
    """The local batch sizes that were measured."""
    flops_per_s: float | None = None
    """What the measuring device achieved; None: times were written by hand for the planned devices."""
    source: str = "given"
    """`measured`, or `given` in a file written by hand."""

    def __post_init__(self) -> None:
        if not self.operators:
            raise ValueError("a model has at least one operator")
        names = [op.name for op in self.operators]
        if len(set(names)) != len(names):
            double = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two operators are called {double!r}; names must differ")

    @property
    def parameter_bytes(self) -> int:
        """Of all operators."""
        return sum(op.parameter_bytes for op in self.operators)

    @property
    def batch(self) -> int | None:
        """The script's own batch size, the largest that is measured; None in a file that names none."""
        return max(self.batches, default=None)

    @property
    def flops(self) -> float:
        """Forward, per sample."""
        return sum(op.flops for op in self.operators)

    def fingerprint(self) -> str:
        """Of what the model is: operators and their sizes, not how fast they were."""
        return digest([[op.name, op.kind, op.parameter_bytes] for op in self.operators if op.parameter_bytes])

    def scaled(self, factor: float) -> ModelProfile:
        """The same model on devices this many times as fast."""
        return msgspec.structs.replace(
            self,
            operators=tuple(
                msgspec.structs.replace(
                    op, fixed_s=op.fixed_s / factor, per_sample_s=op.per_sample_s / factor
                )
                for op in self.operators
            ),
        )


def load_model_profile(path: Path) -> ModelProfile:
    """Read one that was measured, or written by hand."""
    return checked(read_table(path, "model profile"), ModelProfile, path, "model profile")


def fit(batches: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Least squares of `fixed + per_sample * batch`, neither of them below 0. Errors count in proportion to
    the value: else the largest decides alone, and what is fixed is what it leaves over."""
    if len(batches) != len(values) or not batches:
        raise ConfigError("a fit needs as many values as batch sizes, and at least one.")
    least = LEAST_VALUE * max(values)
    if not least:
        return 0.0, 0.0
    points = [(b, v, max(v, least) ** -2) for b, v in zip(batches, values, strict=True)]
    total = sum(w for _, _, w in points)
    mean_b, mean_v = sum(w * b for b, _, w in points) / total, sum(w * v for _, v, w in points) / total
    spread = sum(w * (b - mean_b) ** 2 for b, _, w in points)
    if not spread:
        return 0.0, mean_v / mean_b
    slope = sum(w * (b - mean_b) * (v - mean_v) for b, v, w in points) / spread
    fixed = mean_v - slope * mean_b
    if slope < 0:
        return mean_v, 0.0
    if fixed < 0:  # through the origin
        return 0.0, sum(w * b * v for b, v, w in points) / sum(w * b * b for b, _, w in points)
    return fixed, slope
