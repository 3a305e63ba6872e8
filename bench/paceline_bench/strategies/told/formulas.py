"""What a strategy should take in a cell, by formula: the same ones that `paceline advise strategy` uses."""

from __future__ import annotations

import msgspec
import torch

from paceline.parallel.plans.measure_cluster import link_of
from paceline.plan.profile.cluster import ClusterProfile, Device, Kind, TransferCost
from paceline.plan.strategy.models import STRATEGIES, Load, Strategy, sent_bytes
from paceline_bench.strategies.cells import Cell, Setup
from paceline_bench.strategies.roster import LOCAL_STEPS
from paceline_bench.strategies.runs.models import activation_bytes, make, parameter_bytes
from paceline_bench.strategies.runs.places import probe

LATENCY_S = 2e-4
"""Of a throttled link, about; its speed is known."""
ROOM = 1 << 40


class Loads:
    """Loads of cells; what has to be measured for one is measured once."""

    def __init__(self, setup: Setup, shape: tuple[int, int, int]) -> None:
        self._setup, self._shape = setup, shape
        self._lines: dict[int, dict[Kind, TransferCost]] = {}

    def of(self, cell: Cell, alone_s: float) -> Load:
        """`alone_s`: what one worker takes for a global batch."""
        setup, memory = self._setup, cell.kind == "memory"
        batch = setup.memory_batch if memory else setup.batch // cell.workers
        model = make(
            cell.model, self._shape, (setup.memory_widths if memory else setup.widths)[cell.model], 0
        )
        slow = setup.slow(cell)
        each_s = alone_s if memory else alone_s / cell.workers
        return Load(
            parameters=parameter_bytes(model),
            largest=max(map(parameter_bytes, model)),
            activations=activation_bytes(model, torch.zeros(batch, *self._shape)),
            state_copies=1,
            seconds=tuple(each_s * slow.get(rank, 1.0) for rank in range(cell.workers)),
            batch=batch,
            cluster=self._cluster(cell),
        )

    def _cluster(self, cell: Cell) -> ClusterProfile:
        devices = tuple(Device(name="cpu", flops_per_s=1.0, memory_bytes=ROOM) for _ in range(cell.workers))
        if cell.link == "throttled" or cell.kind == "memory" or cell.workers == 1:
            link = TransferCost(latency_s=LATENCY_S, bytes_per_s=self._setup.mbit * 1e6 / 8)
            return ClusterProfile(devices=devices, link=link, overhead_bytes=0)
        if cell.workers not in self._lines:
            self._lines[cell.workers] = msgspec.convert(probe(cell.workers), dict[Kind, TransferCost])
        lines = self._lines[cell.workers]
        link = link_of(lines, cell.workers)
        return ClusterProfile(devices=devices, link=link, collectives=lines, overhead_bytes=0)


def state_bytes(strategy: str, load: Load) -> float:
    """Parameters, gradients and optimizer state of a worker, without activations and what FSDP gathers."""
    if strategy == "fsdp":
        return 3 * load.parameters / load.workers
    return (2 if strategy.startswith("ps") else 3) * load.parameters


def server_bytes(load: Load) -> float:
    """What a parameter server has: weights, a gradient, and the optimizer's state."""
    return (2 + load.state_copies) * load.parameters


def step_bytes(strategy: str, load: Load) -> float:
    """What the last host sends in a step, in the mean of both ways.

    Paceline's all-reduce over several hosts is no ring: a vector goes to the first host, and one comes back,
    as between a worker and a store. Where the store lies on all hosts, a host sends the others their portions
    of its gradient, and each of them its own portion of the weights. With `int8` a host sends a byte for each
    number, and gets those of all others.
    """
    if strategy == "bsp+store_hosts":
        return 2 * (load.workers - 1) / load.workers * load.parameters
    if strategy == "allreduce+int8":
        return load.workers / 8 * load.parameters
    if strategy == "local_sgd":
        return load.parameters / LOCAL_STEPS
    return sent_bytes(formula_name(strategy), load)


def formula_name(strategy: str) -> Strategy:
    """Whose formula a strategy has: of ours all have a store, but for what `step_bytes` knows."""
    return next((name for name in STRATEGIES if name == strategy), "ps-async")
