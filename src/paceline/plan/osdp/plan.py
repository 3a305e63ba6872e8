"""An OSDP plan: what becomes of every operator, what it costs, and what the alternatives would. Saved as
JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from paceline.errors import ConfigError
from paceline.plan.osdp.knapsack import Solution, measured
from paceline.plan.osdp.options import Mode, OsdpCosts
from paceline.plan.osdp.simplest import Chooser, ChosenPlan
from paceline.plan.profile import ClusterProfile, ModelProfile
from paceline.plan.profile.files import checked, digest, read_table


class OperatorPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One operator's part."""

    name: str
    kind: str
    parameter_bytes: int
    mode: Mode
    slices: int = 1
    sharded: int = 0
    seconds: float = 0.0
    comm_s: float = 0.0
    memory_bytes: int = 0
    surge_bytes: int = 0
    activation_bytes: int = 0
    """Of the memory, what is kept from forward to backward."""


class PlanFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan comes to, by the model."""

    seconds: float
    memory_bytes: int
    """Per device at its peak, overhead included."""
    low_s: float | None = None
    """With every transfer as short as one in ten of the measured ones was."""
    high_s: float | None = None
    """With every transfer as long as one in ten."""
    samples_per_s: float
    fits: bool = True
    batch: int = 1


class OsdpPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `paceline plan osdp` writes and `paceline train --plan` carries out."""

    planner: Literal["osdp"] = "osdp"
    model: str
    fingerprint: str
    """Of the model: a plan for another one is refused."""
    cluster: ClusterProfile
    """A run on another one is refused."""
    workers: int
    batch: int
    """Samples per worker and step."""
    limit_bytes: int
    overhead_bytes: int
    predicted: PlanFigures
    operators: tuple[OperatorPlan, ...]
    replicated: PlanFigures
    """All operators replicated, for the same batch."""
    sharded: PlanFigures
    """All operators sharded, for the same batch."""
    next_gib: PlanFigures | None = None
    """What a limit of one GiB more would give; None: nothing."""
    simplest: str = ""
    """Which simpler plan was taken, since measured times cannot tell it from the fastest."""
    instead_of_s: float | None = None
    """What the fastest plan takes by the medians, if a simpler one was taken."""
    modes: tuple[Mode, ...] = ("dp", "zdp")
    overlap: bool = False
    optimizer: str = ""

    def simple(self) -> dict[str, PlanFigures]:
        """The simple alternatives, by name."""
        return {"all replicated (DDP, even)": self.replicated, "all sharded (FSDP, even)": self.sharded}

    def digest(self) -> str:
        """The same for all ranks that hold the same plan."""
        return digest(self)


def make_plan(
    profile: ModelProfile, costs: OsdpCosts, limit: int, chooser: Chooser, choice: ChosenPlan
) -> OsdpPlan:
    """A solution in words that can be saved, shown and carried out."""
    cluster, found = costs.cluster, choice.found
    operators = tuple(
        OperatorPlan(
            name=op.name,
            kind=op.kind,
            parameter_bytes=op.parameter_bytes,
            mode=option.mode,
            slices=option.slices,
            sharded=option.sharded,
            seconds=option.seconds,
            comm_s=option.comm_s,
            memory_bytes=option.memory,
            surge_bytes=option.surge,
            activation_bytes=int(costs.batch * op.activation_bytes),
        )
        for op, option in zip(profile.operators, found.chosen, strict=True)
    )
    return OsdpPlan(
        model=profile.model,
        fingerprint=profile.fingerprint(),
        cluster=cluster,
        workers=cluster.size,
        batch=costs.batch,
        limit_bytes=limit,
        overhead_bytes=cluster.overhead_bytes,
        predicted=figures(found, costs, limit, chooser.range(found)),
        operators=operators,
        replicated=uniform(profile, costs, limit, "dp"),
        sharded=uniform(profile, costs, limit, "zdp"),
        instead_of_s=choice.fastest_s if choice.name else None,
        simplest=choice.name,
        modes=costs.modes,
        overlap=costs.overlap,
        optimizer=profile.optimizer,
    )


def figures(found: Solution, costs: OsdpCosts, limit: int, ends: tuple[float, float]) -> PlanFigures:
    """What a solution comes to on the cluster. `ends`: of the range that its time is in."""
    memory = found.memory + costs.cluster.overhead_bytes
    rate = costs.batch * costs.cluster.size / found.seconds if found.seconds else 0.0
    return PlanFigures(
        seconds=found.seconds,
        low_s=ends[0],
        high_s=ends[1],
        memory_bytes=memory,
        samples_per_s=rate,
        fits=memory <= limit,
        batch=costs.batch,
    )


def uniform(profile: ModelProfile, costs: OsdpCosts, limit: int, mode: Mode) -> PlanFigures:
    """The same for all operators, unsplit: plain data parallel, or fully sharded."""
    plain = costs._replace(modes=(mode,), slices=(1,), split={})
    found = measured([plain.options(op)[0] for op in profile.operators])
    return figures(found, plain, limit, Chooser(profile, plain).range(found))


def load_plan(path: Path) -> OsdpPlan:
    """Read a plan file."""
    table = read_table(path, "plan")
    planner = table.get("planner") if isinstance(table, dict) else None
    if planner != "osdp":
        raise ConfigError(
            f"{path} is no OSDP plan (its planner is {planner!r}). Make one with `paceline plan osdp`."
        )
    return checked(table, OsdpPlan, path, "plan")


def memory_curve(plan: OsdpPlan) -> list[tuple[str, int]]:
    """Bytes on a device while the step goes forward and back, operator by operator: name, bytes."""
    resident = plan.overhead_bytes + sum(op.memory_bytes - op.activation_bytes for op in plan.operators)
    curve, kept = [], 0
    for op in plan.operators:
        kept += op.activation_bytes
        curve.append((f"{op.name} forward", resident + kept + op.surge_bytes))
    for op in reversed(plan.operators):
        curve.append((f"{op.name} backward", resident + kept + op.surge_bytes))
        kept -= op.activation_bytes
    return curve
