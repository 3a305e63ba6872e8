"""HAP's outer loop, programs and ratios in turn until nothing improves, and the plan that comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from paceline.errors import ConfigError
from paceline.plan.hap.costs import HapCosts
from paceline.plan.hap.graph import Graph
from paceline.plan.hap.program import Program
from paceline.plan.hap.ratios import Ratios, best_ratios, held_bytes, proportional
from paceline.plan.hap.search import Limits, synthesize
from paceline.plan.profile import ClusterProfile
from paceline.plan.profile.files import checked, digest, read_table

MOST_ROUNDS = 20


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a way to run comes to, by the model."""

    seconds: float
    samples_per_s: float
    memory_bytes: int
    """Of the device that holds most."""
    fits: bool = True
    """On every device."""


class HapPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `paceline plan hap` writes and `paceline train --plan` carries out."""

    planner: Literal["hap"] = "hap"
    model: str
    fingerprint: str
    cluster: ClusterProfile
    """A run on another one is refused."""
    workers: int
    batch: int
    """Samples of one step, over all workers."""
    segments: int
    ratios: Ratios
    program: Program
    predicted: Prediction
    alternatives: dict[str, Prediction]
    costs: tuple[float, ...] = ()
    """Seconds after every round of program and ratios."""
    notes: tuple[str, ...] = ()

    def simple(self) -> dict[str, Prediction]:
        """The simple alternatives, by name."""
        return self.alternatives

    def digest(self) -> str:
        """The same for all ranks that hold the same plan."""
        return digest(self)


def plan_hap(
    graph: Graph, cluster: ClusterProfile, model: str, batch: int, copies: float = 4.0, segments: int = 1
) -> HapPlan:
    """The best program and ratios. `copies`: bytes held for each byte of a parameter (4 for Adam)."""
    graph = graph.parts(segments)
    program, ratios, costs = fitting(graph, cluster, segments, copies)
    return HapPlan(
        model=model,
        fingerprint=graph.fingerprint(),
        cluster=cluster,
        workers=cluster.size,
        batch=batch,
        segments=segments,
        ratios=ratios,
        program=program,
        predicted=_predicted(program, graph, cluster, ratios, batch, copies),
        alternatives=_alternatives(graph, cluster, batch, copies),
        costs=costs,
        notes=graph.notes,
    )


def fitting(
    graph: Graph, cluster: ClusterProfile, segments: int, copies: float
) -> tuple[Program, Ratios, tuple[float, ...]]:
    """The fastest program; if that does not fit, one that holds less, at the lowest price of a byte that
    does."""
    try:
        return alternate(graph, cluster, segments, copies)
    except ConfigError as error:
        least = error
    for power in range(-14, -4):
        limits = Limits(byte_price=10.0**power, copies=copies)
        try:
            return alternate(graph, cluster, segments, copies, limits)
        except ConfigError as error:
            least = error
    raise least


def alternate(
    graph: Graph, cluster: ClusterProfile, segments: int = 1, copies: float = 4.0, limits: Limits = Limits()
) -> tuple[Program, Ratios, tuple[float, ...]]:
    """Search and balance in turn. Of every program, the better of both ratios is kept: those that it was
    found for, and those that were then found for it."""
    ratios, best, seen = proportional(cluster, segments), None, []
    for _ in range(MOST_ROUNDS):
        program = synthesize(graph, HapCosts(cluster, ratios), limits)
        balanced = best_ratios(program, graph, cluster, segments, copies)
        better = repriced(program, HapCosts(cluster, balanced))
        fits = _fits(program, graph, cluster, ratios, copies, segments)
        if fits and program.seconds <= better.seconds:
            better, balanced = program, ratios
        if best is not None and better.seconds >= best[0].seconds * (1 - 1e-9):
            break
        best, ratios = (better, balanced), balanced
        seen.append(better.seconds)
    assert best is not None
    return best[0], best[1], tuple(seen)


def repriced(program: Program, costs: HapCosts) -> Program:
    """The same program with other ratios."""
    made = tuple(
        msgspec.structs.replace(
            each,
            compute_s=costs.compute_s(each.flops, each.shared, each.segment),
            comm_s=each.fixed_s + each.longest_s * costs.longest[each.segment],
        )
        for each in program.instructions
    )
    return msgspec.structs.replace(program, instructions=made)


def memory_of(
    program: Program, graph: Graph, cluster: ClusterProfile, ratios: Ratios, copies: float
) -> list[float]:
    """Bytes on every device."""
    whole, divided = held_bytes(program, graph, copies, len(ratios))
    return [
        cluster.overhead_bytes + whole + sum(size * ratios[s][d] for s, size in enumerate(divided))
        for d in range(cluster.size)
    ]


def _fits(
    program: Program, graph: Graph, cluster: ClusterProfile, ratios: Ratios, copies: float, segments: int
) -> bool:
    return _enough(memory_of(program, graph, cluster, ratios, copies), cluster)


def _enough(held: list[float], cluster: ClusterProfile) -> bool:
    return all(size <= device.memory_bytes for size, device in zip(held, cluster.devices, strict=True))


def _predicted(
    program: Program, graph: Graph, cluster: ClusterProfile, ratios: Ratios, batch: int, copies: float
) -> Prediction:
    return _prediction(program.seconds, memory_of(program, graph, cluster, ratios, copies), cluster, batch)


def _prediction(seconds: float, held: list[float], cluster: ClusterProfile, batch: int) -> Prediction:
    return Prediction(
        seconds=seconds,
        samples_per_s=batch / seconds if seconds else 0.0,
        memory_bytes=int(max(held)),
        fits=_enough(held, cluster),
    )


def _alternatives(graph: Graph, cluster: ClusterProfile, batch: int, copies: float) -> dict[str, Prediction]:
    """The simple ways, by the same model: even and balanced data parallel, fully sharded."""
    graph = graph.parts(1)
    simple = Limits(move=False, shard_parameters=False)
    even: Ratios = ((1 / cluster.size,) * cluster.size,)
    made = {}
    try:
        plain = synthesize(graph, HapCosts(cluster, even), simple)
    except ConfigError:
        return {}
    made["DDP, even"] = _predicted(plain, graph, cluster, even, batch, copies)
    speeds = proportional(cluster)
    balanced = synthesize(graph, HapCosts(cluster, speeds), simple)
    made["DDP, batches by speed (--balance)"] = _predicted(balanced, graph, cluster, speeds, batch, copies)
    made["FSDP, even"] = _sharded(plain, graph, cluster, batch, copies)
    return made


def _sharded(plain: Program, graph: Graph, cluster: ClusterProfile, batch: int, copies: float) -> Prediction:
    """Even data parallel with parameters gathered twice and gradients scattered, instead of added up."""
    nodes = graph.by_name()
    sizes = [nodes[name].size_bytes for name in plain.placements]
    gather, scatter = cluster.line("all_gather"), cluster.line("reduce_scatter")
    seconds = sum(each.compute_s for each in plain.instructions)
    seconds += sum(2 * gather.seconds(size) + scatter.seconds(size) for size in sizes)
    even: Ratios = ((1 / cluster.size,) * cluster.size,)
    less = copies * sum(sizes) * (1 - 1 / cluster.size)
    held = [size - less for size in memory_of(plain, graph, cluster, even, copies)]
    return _prediction(seconds, held, cluster, batch)


def load_hap_plan(path: Path) -> HapPlan:
    """Read a plan file."""
    table = read_table(path, "plan")
    planner = table.get("planner") if isinstance(table, dict) else None
    if planner != "hap":
        raise ConfigError(
            f"{path} is no HAP plan (its planner is {planner!r}). Make one with `paceline plan hap`."
        )
    return checked(table, HapPlan, path, "plan")
