"""HAP's load balancing: for a fixed program, the ratios that make it fastest. A linear program.

For each segment: minimise `work * t + moving * m` subject to `t >= B_d / F_d`, `m >= B_d`, `sum B = 1`,
`B >= 0`, and, where devices have a limit, that what they hold fits. Maxima have no upper bound, and
constants are kept, unlike in the published code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors import ConfigError
from paceline.plan.hap.graph import Graph
from paceline.plan.hap.program import Program
from paceline.plan.profile import ClusterProfile
from paceline.plan.profile.units import size_text

Ratios = tuple[tuple[float, ...], ...]
MOST_CORNERS = 8
"""So many of the speeds of a cluster are tried as caps, the highest and the lowest among them."""


def proportional(cluster: ClusterProfile, segments: int = 1) -> Ratios:
    """As fast as each computes."""
    total = sum(device.flops_per_s for device in cluster.devices)
    return (tuple(device.flops_per_s / total for device in cluster.devices),) * segments


def corners(cluster: ClusterProfile) -> list[tuple[float, ...]]:
    """Ratios of which some are the best for any program of one segment, memory aside.

    A program's time is a sum of two maxima, of `B_d / F_d` and of `B_d`. For a given `max B_d` the first is
    least if ratios go with the speeds and are capped. So time is a broken line in the cap, and least where
    some speed meets the cap: as fast as each computes, but no faster than one of the speeds. The lowest speed
    gives even ratios, the highest those in proportion."""
    speeds = [device.flops_per_s for device in cluster.devices]
    caps = sorted(set(speeds), reverse=True)
    if len(caps) > MOST_CORNERS:
        caps = [caps[round(i * (len(caps) - 1) / (MOST_CORNERS - 1))] for i in range(MOST_CORNERS)]
    made = []
    for cap in caps:
        capped = [min(speed, cap) for speed in speeds]
        made.append(tuple(each / sum(capped) for each in capped))
    return made


def best_ratios(
    program: Program, graph: Graph, cluster: ClusterProfile, segments: int, copies: float
) -> Ratios:
    """All segments at once, since memory ties them together. `copies`: state per parameter byte, in all."""
    linprog = _solver()
    n = cluster.size
    width = n + 2
    objective, rows, bounds = [0.0] * (width * segments), [], []
    for each in program.instructions:
        at = each.segment * width
        objective[at + n] += 3 * each.flops if each.shared else 0.0
        objective[at + n + 1] += each.longest_s
    fastest = max(device.flops_per_s for device in cluster.devices)
    for s in range(segments):
        objective[s * width + n] /= fastest
        for d, device in enumerate(cluster.devices):
            rows.append(
                _row(width * segments, {s * width + d: fastest / device.flops_per_s, s * width + n: -1.0})
            )
            rows.append(_row(width * segments, {s * width + d: 1.0, s * width + n + 1: -1.0}))
    bounds = [0.0] * len(rows)
    for d, (row, room) in enumerate(_memory_rows(program, graph, cluster, segments, copies, width)):
        if room < 0:
            size = size_text(cluster.devices[d].memory_bytes)
            raise ConfigError(
                f"device {d} ({size}) cannot hold what every device has to hold. Use a smaller batch, or "
                "larger devices."
            )
        rows.append(row)
        bounds.append(room)
    sums = [_row(width * segments, {s * width + d: 1.0 for d in range(n)}) for s in range(segments)]
    most = max(objective) or 1.0  # the solver takes seconds as small as these for zero
    objective = [each / most for each in objective]
    limits = [(0, None)] * (width * segments)
    ones = [1.0] * segments
    found = linprog(objective, rows, bounds, sums, ones, bounds=limits, method="highs")
    if not found.success:
        raise ConfigError(
            "no sharding ratios fit into the devices' memory. Use fewer samples, or larger devices."
        )
    return tuple(_normal(found.x[s * width : s * width + n]) for s in range(segments))


def _normal(values: Sequence[float]) -> tuple[float, ...]:
    kept = [max(0.0, float(value)) for value in values]
    return tuple(value / sum(kept) for value in kept)


def _row(width: int, entries: dict[int, float]) -> list[float]:
    row = [0.0] * width
    for place, value in entries.items():
        row[place] = value
    return row


def held_bytes(program: Program, graph: Graph, copies: float, segments: int) -> tuple[float, list[float]]:
    """What every device holds in full, and what is divided by the ratios of each segment."""
    nodes, whole, divided = graph.by_name(), 0.0, [0.0] * segments
    for name, held in program.placements.items():
        size = nodes[name].size_bytes * (copies if nodes[name].attrs.get("trained", True) else 1.0)
        if held == "I":
            whole += size
        else:
            divided[_segment_of(name, graph)] += size
    for each in program.instructions:
        if each.kind == "compute" and each.after[0] == "G":
            divided[each.segment] += nodes[each.tensor].size_bytes
        elif each.kind in ("compute", "all_gather", "all_reduce"):
            whole += nodes[each.tensor].size_bytes
        elif each.after[:1] == "G":
            divided[each.segment] += nodes[each.tensor].size_bytes
    return whole, divided


def _segment_of(name: str, graph: Graph) -> int:
    return next((node.segment for node in graph.nodes if name in node.inputs), 0)


def _memory_rows(
    program: Program, graph: Graph, cluster: ClusterProfile, segments: int, copies: float, width: int
) -> list[tuple[list[float], float]]:
    whole, divided = held_bytes(program, graph, copies, segments)
    scale = max(divided) or 1.0
    made = []
    for d, device in enumerate(cluster.devices):
        row = _row(width * segments, {s * width + d: size / scale for s, size in enumerate(divided)})
        made.append((row, (device.memory_bytes - cluster.overhead_bytes - whole) / scale))
    return made


def _solver() -> Any:
    try:
        from scipy.optimize import linprog
    except ImportError:
        raise ConfigError("planning ratios needs SciPy. Install it: pip install 'paceline[plan]'") from None
    return linprog
