"""ZipLine: one future push per worker, chosen so that the chosen ones lie closest together.

Paper: Zhao, Papagelis, An, Chen, Liu, Hu, "Elastic Bulk Synchronous Parallel Model for Distributed
Deep Learning", IEEE ICDM 2019, arXiv 2001.01347; proved optimal in Machine Learning 2021.

A search takes each worker's predicted end times, a row in ascending order, and returns each worker's quota:
the number (from 1) of the end at which it stops. It minimises the time between the first and the last chosen
end, which is how long the first worker waits.

Where we differ: the paper sorts all points and repeatedly drops the earliest of a set. Here a heap advances
the earliest head of n sorted rows, which visits the same sets in O(R n log n) without sorting n R points.
GridScan and FullGridScan are the paper's heuristics, for comparison.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import islice

Rows = Sequence[list[float]]


def zipline(ends: Rows) -> list[int]:
    """The optimal choice; the earliest one among equals."""
    if not ends:
        return []
    latest = max(row[0] for row in ends)
    # Up to here the latest stays the same, so that every step of another row makes the choice better.
    start = min(row[bisect_right(row, latest) - 1] for row in ends)
    best = latest - start
    rows = [islice(row, bisect_left(row, start), None) for row in ends]
    heads = [(next(row), worker) for worker, row in enumerate(rows)]
    heapify(heads)
    while best > 0:
        worker, too_early = heads[0][1], latest - best  # so early that the latest is too late for it
        for end in rows[worker]:
            if end > too_early:
                break
        else:
            break
        heapreplace(heads, (end, worker))
        if end > latest:
            latest = end
        if latest - heads[0][0] < best:
            start = heads[0][0]
            best = latest - start
    # A head is advanced only when it comes too early, so each one was its row's first end from `start` on.
    return [bisect_left(row, start) + 1 for row in ends]


def grid_scan(ends: Rows) -> list[int]:
    """For each end of the row that begins first, the nearest of every other row. O(R n log R)."""
    return _nearest_to(ends, min(ends, default=[]))


def full_grid_scan(ends: Rows) -> list[int]:
    """For each end of every row, the nearest of every other row. O(R n^2 log R)."""
    return _nearest_to(ends, (end for row in ends for end in row))


SEARCHES: dict[str, Callable[[Rows], list[int]]] = {
    "zipline": zipline,
    "grid": grid_scan,
    "full_grid": full_grid_scan,
}


def _nearest_to(ends: Rows, targets: Iterable[float]) -> list[int]:
    best, quotas = float("inf"), [1] * len(ends)
    for target in targets:
        nearest = [_nearest(row, target) for row in ends]
        chosen = [row[at] for row, at in zip(ends, nearest, strict=True)]
        span = max(chosen) - min(chosen)
        if span < best:
            best, quotas = span, [at + 1 for at in nearest]
    return quotas


def _nearest(row: list[float], target: float) -> int:
    after = bisect_left(row, target)
    if after == len(row) or (after > 0 and target - row[after - 1] <= row[after] - target):
        return after - 1
    return after
