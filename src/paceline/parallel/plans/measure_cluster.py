"""Measures the machines: how fast every worker computes, and what gloo's collectives take among them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.plans.hap.uneven import gather_into, scatter_into
from paceline.parallel.plans.host import available_bytes, this_host
from paceline.parallel.plans.processes import run_ranks
from paceline.plan.profile.cluster import ClusterProfile, Device, Kind, TransferCost
from paceline.plan.profile.model import fit
from paceline.plan.profile.units import MIB

SIZES = (4 * 1024, 64 * 1024, MIB, 4 * MIB, 16 * MIB)
"""From those that are all latency to those that are hardly any."""
REPEATS, AT_LEAST = 11, 3
"""Times each size is timed; the lesser number where that takes long. One alone would count every hiccup."""
LONG_S = 0.6
"""After a size whose repeats take longer than this in all, no larger one is timed."""
MATRIX = 384


def measure_cluster(workers: int, slow: dict[int, float] | None = None) -> ClusterProfile:
    """Start so many workers here and time them. `slow`: ranks that are to count as slower than they are."""
    answers = run_ranks(f"{__name__}:on_rank", workers, {}, timeout_s=300, forked=True)
    memory = available_bytes() // workers
    devices = tuple(
        Device(
            name="cpu",
            flops_per_s=answer["flops_per_s"] / (slow or {}).get(rank, 1.0),
            memory_bytes=memory,
            jitter=answer["jitter"],
        )
        for rank, answer in enumerate(answers)
    )
    lines, low, high = (
        msgspec.convert(answers[0][name], dict[Kind, TransferCost]) for name in ("lines", "low", "high")
    )
    link = link_of(lines, workers)
    return ClusterProfile(
        devices=devices,
        link=link,
        collectives=lines,
        low=low,
        high=high,
        overhead_bytes=0,
        source="measured",
        host=this_host(),
        slow=slow or {},
    )


def link_of(lines: dict[Kind, TransferCost], workers: int) -> TransferCost:
    """The latency and rate of one link that a ring would need to take as long as all-gather and scatter
    did."""
    if workers == 1:
        return TransferCost(latency_s=0.0, bytes_per_s=1e12)
    both = [lines["all_gather"], lines["reduce_scatter"]]
    latency = sum(line.latency_s for line in both) / 2 / (workers - 1)
    rate = 2 / sum(1 / line.bytes_per_s for line in both) * (workers - 1) / workers
    return TransferCost(latency_s=latency, bytes_per_s=rate)


def on_rank(rank: int, size: int, request: Any) -> dict[str, Any]:
    """One worker's part."""
    speed, jitter = _speed()
    return {"flops_per_s": speed, "jitter": jitter, **_lines({} if size == 1 else collectives(rank, size))}


def _speed() -> tuple[float, float]:
    """Of matrix products, while all the others compute as well."""
    a, b = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    dist.barrier()
    times = [_timed(lambda: torch.mm(a, b)) for _ in range(40)][5:]
    median = statistics.median(times)
    return 2 * MATRIX**3 / median, statistics.pstdev(times) / median


def collectives(rank: int, size: int) -> dict[Kind, Callable[[int], Callable[[], None]]]:
    """For every kind of collective: given the bytes of the whole tensor, what to time."""

    def parts(whole: int) -> tuple[Tensor, Tensor]:
        each = max(1, whole // 4 // size)
        return torch.zeros(each * size), torch.zeros(each)

    def grouped(whole: int, start: Callable[[Tensor, int], Any]) -> Callable[[], None]:
        pieces = [torch.zeros(max(1, whole // 4 // size)) for _ in range(size)]

        def run() -> None:
            for work in [start(piece, other) for other, piece in enumerate(pieces)]:
                work.wait()

        return run

    def on_parts(run: Callable[[Tensor, Tensor], Any]) -> Callable[[int], Callable[[], None]]:
        def make(whole: int) -> Callable[[], None]:
            full, part = parts(whole)
            return lambda: run(full, part)

        return make

    return {
        "all_gather": on_parts(lambda full, part: gather_into(full, part)),
        "reduce_scatter": on_parts(lambda full, part: scatter_into(part, full)),
        "all_reduce": on_parts(lambda full, part: dist.all_reduce(full)),
        "all_to_all": on_parts(lambda full, part: dist.all_to_all_single(torch.empty_like(full), full)),
        "gather_grouped": lambda whole: grouped(whole, lambda t, r: dist.broadcast(t, r, async_op=True)),
        "scatter_grouped": lambda whole: grouped(whole, lambda t, r: dist.reduce(t, r, async_op=True)),
    }


def _lines(made: dict[Kind, Callable[[int], Callable[[], None]]]) -> dict[str, dict[Kind, Any]]:
    """Latency and rate of every collective: by medians (`lines`), and where one in ten repeats took less
    (`low`) or longer (`high`)."""
    seen: dict[Kind, list[list[float]]] = {kind: [] for kind in made}
    left = dict(made)
    for whole in SIZES:
        took = _repeats({kind: make(whole) for kind, make in left.items()})
        for kind, times in took.items():
            seen[kind].append(times)
            if sum(times) > LONG_S:  # a slow link: larger sizes would show nothing new
                del left[kind]
    ends = {"lines": 0.5, "low": 0.1, "high": 0.9}
    return {
        name: {kind: _line([_quantile(times, share) for times in sizes]) for kind, sizes in seen.items()}
        for name, share in ends.items()
    }


def _line(times: list[float]) -> dict[str, float]:
    latency, per_byte = fit(SIZES[: len(times)], times)
    return {"latency_s": latency, "bytes_per_s": 1 / max(per_byte, 1e-15)}


def _quantile(times: list[float], share: float) -> float:
    """Between the two nearest ones."""
    ordered, at = sorted(times), share * (len(times) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def _repeats(runs: dict[Kind, Callable[[], None]]) -> dict[Kind, list[float]]:
    """Times of each, taken in turn: what slows the machine down for a while slows them all down."""
    for run in runs.values():
        run()
    took: dict[Kind, list[float]] = {kind: [] for kind in runs}
    wanted = True
    while wanted:
        wanted = False
        for kind, run in runs.items():
            times = took[kind]
            if len(times) < AT_LEAST or (len(times) < REPEATS and sum(times) <= LONG_S):
                dist.barrier()
                times.append(_slowest(_timed(run)))
                wanted = True
    return took


def _slowest(seconds: float) -> float:
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
