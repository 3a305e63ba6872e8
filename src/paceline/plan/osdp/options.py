"""What can be done with one operator, and what each way costs: OSDP's cost model.

Ways (modes): `dp` keeps everything on every device and averages gradients; `zdp` keeps a share of
everything, gathers the parameters for forward and again for backward, and scatters gradients (ZeRO-3);
`keep` does the same but holds the gathered parameters from forward to backward (ZeRO-2). A linear
operator may be cut into slices that are gathered one after the other; then each slice is replicated or
sharded, and only their number matters.

The paper's own code calls `keep` "DP"; the three are told apart here, and `keep` is searched on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from paceline.errors import ConfigError
from paceline.plan.profile import ClusterProfile, ModelProfile, Operator

Mode = Literal["dp", "zdp", "keep", "mixed"]
LAUNCH_S = 30e-6
"""What one more slice takes to start, if nobody measured."""


class Option(NamedTuple):
    """One way to treat an operator."""

    seconds: float
    memory: int
    """Bytes for as long as the step lasts."""
    surge: int
    """Bytes while the operator is at work; only the largest of all operators counts."""
    mode: Mode = "dp"
    slices: int = 1
    sharded: int = 0
    """How many of the slices are sharded."""
    comm_s: float = 0.0


class OsdpCosts(NamedTuple):
    """What things cost on a cluster, for a batch per device."""

    cluster: ClusterProfile
    batch: int
    state_copies: float
    modes: tuple[Mode, ...] = ("dp", "zdp")
    slices: tuple[int, ...] = (1,)
    """Numbers of slices to try for operators that can be cut."""
    split: dict[str, int] = {}
    """Operators that are cut into just so many slices."""
    launch_s: float = LAUNCH_S
    overlap: bool = False
    """Communication hides behind the operator's own computation, as far as it can."""
    surge_copies: float = 1.0
    """How many gathered copies of parameters there are at a time, beside the gradient: 2 with prefetch."""

    def options(self, op: Operator) -> list[Option]:
        """All ways that are allowed for this operator."""
        if not op.parameter_bytes or not op.shardable:
            return [self._replicated(op)]
        made = [self._replicated(op)] if "dp" in self.modes else []
        for count in self._slice_counts(op):
            least = 1 if "dp" in self.modes else count
            if "zdp" in self.modes:
                made += [self._sharded(op, count, sharded) for sharded in range(least, count + 1)]
        if "keep" in self.modes:
            made.append(self._kept(op))
        return made

    def _slice_counts(self, op: Operator) -> Sequence[int]:
        if op.name in self.split:
            return (_checked_split(op, self.split[op.name]),)
        return sorted({min(count, op.max_slices) for count in self.slices})

    def _states(self, op: Operator) -> float:
        """Parameters, gradients and the optimizer's memory of one operator, whole."""
        trained = op.parameter_bytes - op.frozen_bytes
        return op.parameter_bytes + trained * (1 + self.state_copies)

    def _made(self, op: Operator, comm_s: float, states: float, surge: float, **way: object) -> Option:
        compute_s = op.seconds(self.batch)
        seconds = max(compute_s, comm_s) if self.overlap else compute_s + comm_s
        memory = _up(states + self.batch * op.activation_bytes)
        surge = 0 if self.cluster.size == 1 else surge
        return Option(seconds, memory, _up(surge), comm_s=comm_s, **way)  # type: ignore[arg-type]

    def _replicated(self, op: Operator) -> Option:
        return self._made(op, self._reduce_s(op, 1), self._states(op), 0, mode="dp")

    def _sharded(self, op: Operator, slices: int, sharded: int) -> Option:
        n, whole = self.cluster.size, slices - sharded
        gather, scatter = self._gather_s(op, slices), self._scatter_s(op, slices)
        comm = whole * self._reduce_s(op, slices) + sharded * (2 * gather + scatter)
        comm += (slices - 1) * self.launch_s
        states = self._states(op) * (whole / slices + sharded / (slices * n))
        trained = op.parameter_bytes - op.frozen_bytes
        surge = (self.surge_copies * op.parameter_bytes + trained) / slices
        mode = "mixed" if whole else "zdp"
        return self._made(op, comm, states, surge, mode=mode, slices=slices, sharded=sharded)

    def _kept(self, op: Operator) -> Option:
        comm = self._gather_s(op, 1) + self._scatter_s(op, 1)
        states = op.parameter_bytes + self._states(op) / self.cluster.size
        surge = op.parameter_bytes - op.frozen_bytes
        if self.cluster.size == 1:
            states -= op.parameter_bytes
        return self._made(op, comm, states, surge, mode="keep", sharded=1)

    def _reduce_s(self, op: Operator, slices: int) -> float:
        trained = op.parameter_bytes - op.frozen_bytes
        return self.cluster.line("all_reduce").seconds(trained / slices) if trained else 0.0

    def _gather_s(self, op: Operator, slices: int) -> float:
        return self.cluster.line("all_gather").seconds(op.parameter_bytes / slices)

    def _scatter_s(self, op: Operator, slices: int) -> float:
        trained = op.parameter_bytes - op.frozen_bytes
        return self.cluster.line("reduce_scatter").seconds(trained / slices) if trained else 0.0


def on_cluster(profile: ModelProfile, cluster: ClusterProfile) -> ModelProfile:
    """The profile with times as on the slowest device of the cluster: in lockstep all wait for it."""
    if profile.flops_per_s is None:
        return profile
    return profile.scaled(cluster.slowest_flops_per_s / profile.flops_per_s)


def _checked_split(op: Operator, slices: int) -> int:
    if slices < 1 or slices > op.max_slices:
        can = (
            f"at most {op.max_slices} slices"
            if op.max_slices > 1
            else "no slices: only linear layers can be cut"
        )
        raise ConfigError(f"operator {op.name!r} ({op.kind}) cannot be split into {slices}; it takes {can}.")
    return slices


def _up(size: float) -> int:
    return int(-(-size // 1))
