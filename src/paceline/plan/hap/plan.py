"""HAP's outer loop, programs and ratios in turn until nothing improves, and the plan that comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from paceline.errors import ConfigError
from paceline.plan.hap.costs import HapCosts
from paceline.plan.hap.graph import Graph, Node
from paceline.plan.hap.program import Program
from paceline.plan.hap.ratios import Ratios, best_ratios, corners, held_bytes, proportional
from paceline.plan.hap.search import Limits, synthesize
from paceline.plan.profile import ClusterProfile
from paceline.plan.profile.files import checked, digest, read_table
from paceline.plan.profile.units import time_text

MOST_ROUNDS = 20
SAME = 1.01
"""Times that differ by less, relative, are called the same."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a way to run comes to, by the model."""

    seconds: float
    samples_per_s: float
    memory_bytes: int
    """Of the device that holds most."""
    fits: bool = True
    """On every device."""


class AloneDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device of the cluster that trains by itself, without a plan."""

    device: int
    name: str
    predicted: Prediction

    @property
    def way(self) -> str:
        """What it is called among the simple ways."""
        return f"device {self.device} alone"


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
    alone: AloneDevice | None = None
    """The best that one device can do."""
    costs: tuple[float, ...] = ()
    """Seconds after every round of program and ratios."""
    notes: tuple[str, ...] = ()

    def simple(self) -> dict[str, Prediction]:
        """The simple alternatives, by name."""
        if self.alone is None:
            return self.alternatives
        return self.alternatives | {self.alone.way: self.alone.predicted}

    def better(self) -> str | None:
        """The fastest simple way that fits, if it is faster than this plan by more than `SAME`; one device
        alone if it is as fast."""
        fitting = {name: way.seconds for name, way in self.simple().items() if way.fits}
        name = min(fitting, key=fitting.__getitem__, default=None)
        if name is None:
            return None
        alone = self.alone is not None and name == self.alone.way
        return name if fitting[name] * (1.0 if alone else SAME) <= self.predicted.seconds else None

    def verdict(self) -> str:
        """In one sentence, whether the plan pays."""
        if self.alone is None:
            return "one device: nothing is divided"
        mine, one = time_text(self.predicted.seconds), self.alone.predicted
        device = f"device {self.alone.device} ({self.alone.name})"
        better = self.better()
        if better == self.alone.way:
            return (
                f"one device alone is best: {device} takes {time_text(one.seconds)} a step, this plan on "
                f"{self.workers} devices {mine}. Train there without a plan, or give a step more samples"
            )
        if better is not None:
            return f"{better} is faster: {time_text(self.simple()[better].seconds)} a step, this plan {mine}"
        if not one.fits:
            return f"divided, a step takes {mine}; no device holds the model by itself"
        times, alone = one.seconds / self.predicted.seconds, time_text(one.seconds)
        return (
            f"divided, a step takes {mine}, {times:.2f} times as fast as {device} alone, which takes {alone}"
        )

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
        alone=_alone(graph, cluster, batch, copies),
        costs=costs,
        notes=graph.notes,
    )


def fitting(
    graph: Graph, cluster: ClusterProfile, segments: int, copies: float
) -> tuple[Program, Ratios, tuple[float, ...]]:
    """The fastest program; if that does not fit, one that holds less, at the lowest price of a byte that
    does."""
    try:
        return fastest(graph, cluster, segments, copies)
    except ConfigError as error:
        least = error
    for power in range(-14, -4):
        limits = Limits(byte_price=10.0**power, copies=copies)
        try:
            return fastest(graph, cluster, segments, copies, limits)
        except ConfigError as error:
            least = error
    raise least


def fastest(
    graph: Graph, cluster: ClusterProfile, segments: int = 1, copies: float = 4.0, limits: Limits = Limits()
) -> tuple[Program, Ratios, tuple[float, ...]]:
    """The best that search and balance come to from any of the corners. The paper starts from the speeds
    alone, and may end at a program that is the best for those ratios only. With one segment, and memory that
    is no limit, no program is faster at any ratios."""
    programs: dict[Ratios, Program] = {}
    found, least = [], None
    for ratios in corners(cluster):
        try:
            found.append(alternate(graph, cluster, segments, copies, limits, (ratios,) * segments, programs))
        except ConfigError as error:
            least = error
    if not found:
        assert least is not None
        raise least
    return min(found, key=lambda each: each[0].seconds)


def alternate(
    graph: Graph,
    cluster: ClusterProfile,
    segments: int = 1,
    copies: float = 4.0,
    limits: Limits = Limits(),
    start: Ratios | None = None,
    programs: dict[Ratios, Program] | None = None,
) -> tuple[Program, Ratios, tuple[float, ...]]:
    """Search and balance in turn. Of every program, the better of both ratios is kept: those that it was
    found for, and those that were then found for it. `programs`: found before, by ratios."""
    ratios, best, seen = start or proportional(cluster, segments), None, []
    programs = {} if programs is None else programs
    for _ in range(MOST_ROUNDS):
        key = tuple(tuple(round(ratio, 9) for ratio in each) for each in ratios)
        if key not in programs:
            programs[key] = synthesize(graph, HapCosts(cluster, ratios), limits)
        program = repriced(programs[key], HapCosts(cluster, ratios))
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
    """The simple ways, by the same prices: data parallel with even batches and with batches by speed, fully
    sharded. Each computes the whole model on its samples, whatever rules there are."""
    even: Ratios = ((1 / cluster.size,) * cluster.size,)
    return {
        "DDP, even": _data_parallel(graph, cluster, even, batch, copies),
        "DDP, batches by speed (--balance)": _data_parallel(
            graph, cluster, proportional(cluster), batch, copies
        ),
        "FSDP, even": _data_parallel(graph, cluster, even, batch, copies, sharded=True),
    }


def _data_parallel(
    graph: Graph, cluster: ClusterProfile, ratios: Ratios, batch: int, copies: float, sharded: bool = False
) -> Prediction:
    """Every device computes its share of the samples; then gradients are added up, or, sharded, parameters
    gathered twice and gradients scattered."""
    costs, (shares,) = HapCosts(cluster, ratios), ratios
    parameters = [node for node in graph.nodes if node.op == "parameter"]
    seconds = sum(costs.compute_s(node.flops, True, 0) for node in graph.nodes)
    for node in parameters:
        trained = node.attrs.get("trained", True)
        if sharded:
            seconds += costs.fully_sharded(node.size_bytes, trained)
        elif trained:
            seconds += costs.replicated(node.size_bytes).fixed
    states = _states(parameters, copies) / (cluster.size if sharded else 1)
    made = sum(node.size_bytes for node in graph.nodes if not node.leaf)
    held = [cluster.overhead_bytes + states + share * made for share in shares]
    return _prediction(seconds, held, cluster, batch)


def _states(parameters: list[Node], copies: float) -> float:
    """Bytes of parameters, gradients and the optimizer's memory, whole."""
    return sum(n.size_bytes * (copies if n.attrs.get("trained", True) else 1.0) for n in parameters)


def _alone(graph: Graph, cluster: ClusterProfile, batch: int, copies: float) -> AloneDevice | None:
    """The fastest device that holds the whole model, by itself; without one that does, the fastest."""
    if cluster.size == 1:
        return None
    flops = sum(node.flops for node in graph.nodes)
    states = _states([node for node in graph.nodes if node.op == "parameter"], copies)
    held = cluster.overhead_bytes + states + sum(n.size_bytes for n in graph.nodes if not n.leaf)
    places = range(cluster.size)
    place = min(
        places, key=lambda d: (held > cluster.devices[d].memory_bytes, -cluster.devices[d].flops_per_s)
    )
    device = cluster.devices[place]
    seconds = 3 * flops / device.flops_per_s
    predicted = Prediction(
        seconds=seconds,
        samples_per_s=batch / seconds if seconds else 0.0,
        memory_bytes=int(held),
        fits=held <= device.memory_bytes,
    )
    return AloneDevice(device=place, name=device.name, predicted=predicted)


def load_hap_plan(path: Path) -> HapPlan:
    """Read a plan file."""
    table = read_table(path, "plan")
    planner = table.get("planner") if isinstance(table, dict) else None
    if planner != "hap":
        raise ConfigError(
            f"{path} is no HAP plan (its planner is {planner!r}). Make one with `paceline plan hap`."
        )
    return checked(table, HapPlan, path, "plan")
