"""What instructions of a distributed program cost, as functions of the sharding ratios.

Computing a shared operation takes `3 * flops * max_d(B_d / F_d)`: forward once, backward twice. Moving
bytes takes a constant plus, for collectives that pad all pieces to the longest one, a part in proportion
to `max_d B_d`. So a program's time is a few sums times two maxima for each segment, which is what makes
the ratios a small linear program. Bytes are bytes: the published code measures bytes per second and
charges elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from paceline.plan.profile import ClusterProfile, TransferCost
from paceline.plan.profile.cluster import KINDS, Kind

TOGETHER_BYTES = 1 << 20
"""Parameters, and gradients of replicated ones, travel together up to this size."""
Variant = Literal["", "padded", "grouped"]


class Price(NamedTuple):
    """Seconds: `fixed + longest * max_d B_d`."""

    fixed: float = 0.0
    longest: float = 0.0
    variant: Variant = ""

    def at(self, longest: float) -> float:
        """With these ratios' maximum."""
        return self.fixed + self.longest * longest


FREE = Price()


class HapCosts:
    """Prices on a cluster, for the ratios of every segment."""

    def __init__(self, cluster: ClusterProfile, ratios: Sequence[Sequence[float]]) -> None:
        self.cluster, self.ratios = cluster, ratios
        self.speeds = [device.flops_per_s for device in cluster.devices]
        self.longest = [max(each) for each in ratios]
        self.slowest = [max(b / f for b, f in zip(each, self.speeds, strict=True)) for each in ratios]
        self._lines: dict[str, TransferCost] = {kind: cluster.line(kind) for kind in KINDS}

    def compute_s(self, flops: float, shared: bool, segment: int) -> float:
        """Forward and backward of one operation."""
        share = self.slowest[segment] if shared else 1 / min(self.speeds)
        return 3 * flops * share

    def move(self, before: str, after: str, size: int, segment: int) -> Price | None:
        """Both ways of a collective on a tensor of so many bytes; None if there is no such collective."""
        kinds = before[0] + after[0]
        if kinds == "IG":
            return FREE
        if kinds == "RI":
            line = self._lines["all_reduce"]
            return Price(2 * line.seconds(size))
        if kinds == "GG":
            line = self._lines["all_to_all"]
            return Price(2 * line.latency_s, 2 * self._padded(size) / line.bytes_per_s, "padded")
        if kinds in ("GI", "RG"):
            return self._uneven(("all_gather", "reduce_scatter"), size, segment)
        return None

    def collect(self, held: str, size: int, segment: int) -> Price:
        """Of the result, for everybody: forward only, since everybody then has the whole gradient."""
        if held == "I":
            return FREE
        if held == "R":
            return Price(self._lines["all_reduce"].seconds(size))
        return self._uneven(("all_gather",), size, segment)

    def replicated(self, size: int) -> Price:
        """A parameter that all have: its gradient is added up."""
        return Price(self._together("all_reduce", size))

    def fully_sharded(self, size: int, trained: bool) -> float:
        """A parameter of which all have an equal share (FSDP): gathered for forward and for backward, its
        gradient scattered."""
        scattered = self._together("reduce_scatter", size) if trained else 0.0
        return 2 * self._together("all_gather", size) + scattered

    def _together(self, kind: Kind, size: int) -> float:
        """Small parameters travel together, and share the latency of a message by their bytes."""
        line = self._lines[kind]
        return line.latency_s * min(1.0, size / TOGETHER_BYTES) + size / line.bytes_per_s

    def inside(self, size: int) -> float:
        """Of an operation that adds up so many bytes over devices within itself, forward and backward, twice
        each: one sum needs the other."""
        return 4 * self._lines["all_reduce"].seconds(size) if size else 0.0

    def _padded(self, size: int) -> float:
        return self.cluster.size * size

    def _uneven(self, kinds: Sequence[str], size: int, segment: int) -> Price:
        """Pieces of unequal length: padded to the longest, or one message of true length from each device."""
        lines = [self._lines[kind] for kind in kinds]
        padded = Price(
            sum(line.latency_s for line in lines),
            sum(self._padded(size) / line.bytes_per_s for line in lines),
            "padded",
        )
        names = {"all_gather": "gather_grouped", "reduce_scatter": "scatter_grouped"}
        grouped = Price(sum(self._lines[names[kind]].seconds(size) for kind in kinds), 0.0, "grouped")
        return min(padded, grouped, key=lambda price: price.at(self.longest[segment]))
