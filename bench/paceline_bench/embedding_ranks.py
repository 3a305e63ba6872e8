"""One worker of the benchmark of embedding tables: every side in turn, on the same ids.

A *step* is what training needs of tables: look up, back-propagate a given gradient, update the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.parallel.embedding.planner import Table
from paceline.parallel.embedding.rowwise import RowWiseAdagrad
from paceline.parallel.embedding.tables import EmbeddingTables
from paceline.parallel.mesh import Mesh
from paceline_bench.wrapped.ddp import wrapped

Step = Callable[[dict[str, Tensor]], None]
LR = 0.01
DRAWN = 8
"""Batches that are used over and over."""


def measure(rank: int, size: int, request: Any) -> dict[str, list[list[float]]]:
    """Seconds of every step by side, in blocks; sides take turns, and all workers begin a step together."""
    batches = _batches(rank, request)
    steps = {name: SIDES[name](rank, size, request) for name in request["sides"]}
    for name in steps:
        for number in range(request["warm_up"]):
            _timed(steps[name], batches[number % DRAWN])
    seen: dict[str, list[list[float]]] = {name: [] for name in steps}
    for _ in range(request["blocks"]):
        for name, step in steps.items():
            seen[name].append([_timed(step, batches[at % DRAWN]) for at in range(request["rounds"])])
    return seen


def _timed(step: Step, batch: dict[str, Tensor]) -> float:
    dist.barrier()
    began = time.perf_counter()
    step(batch)
    return time.perf_counter() - began


def _batches(rank: int, request: Any) -> list[dict[str, Tensor]]:
    """Ids with the skew of real logs: Zipf's, spread over the table."""
    draw = torch.Generator().manual_seed(request["seed"] + 100 * rank)
    order = torch.randperm(request["rows"], generator=torch.Generator().manual_seed(5))
    weights = torch.arange(1, request["rows"] + 1, dtype=torch.float64).pow(-1.05).cumsum(0)
    shape = (request["batch"], request["bag"])

    def ids() -> Tensor:
        places = torch.rand(shape, generator=draw, dtype=torch.float64) * weights[-1]
        return order[torch.searchsorted(weights, places).clamp(max=request["rows"] - 1)]

    return [{name: ids() for name in _names(request)} for _ in range(DRAWN)]


def _names(request: Any) -> list[str]:
    return [f"t{number}" for number in range(request["tables"])]


def _ours(rank: int, size: int, request: Any) -> Step:
    made = DeviceMesh("cpu", torch.arange(size).reshape(1, size), mesh_dim_names=("data", "shard"))
    mesh = Mesh({"data": 1, "shard": size}, rank, made)
    tables = EmbeddingTables(
        mesh, [Table(name, request["rows"], request["width"]) for name in _names(request)]
    )
    kind = RowWiseAdagrad if request["optimizer"] == "row-wise adagrad" else torch.optim.SGD
    optimizer = kind(tables.weights, lr=LR)
    tables.trained_by(optimizer)

    def step(batch: dict[str, Tensor]) -> None:
        _loss(tables(batch)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _loss(found: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(list(found.values()), 1).sum()


def _torchrec(rank: int, size: int, request: Any) -> Step:
    """TorchRec's DistributedModelParallel, table-wise, with FBGEMM's fused row-wise AdaGrad."""
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.optim import RowWiseAdagrad as TheirAdagrad

    names = _names(request)
    configs = [
        EmbeddingBagConfig(
            name=name, embedding_dim=request["width"], num_embeddings=request["rows"], feature_names=[name]
        )
        for name in names
    ]
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    _apply_optimizer_in_backward(TheirAdagrad, bags.parameters(), {"lr": LR})
    sharders = [EmbeddingBagCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=size, compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=["table_wise"]) for name in names},
    )
    plan = planner.collective_plan(bags, sharders, dist.group.WORLD)
    model = DistributedModelParallel(bags, device=torch.device("cpu"), plan=plan, sharders=sharders)
    lengths = torch.full((len(names) * request["batch"],), request["bag"], dtype=torch.int32)

    def step(batch: dict[str, Tensor]) -> None:
        values = torch.cat([batch[name].reshape(-1) for name in names])
        model(KeyedJaggedTensor(keys=names, values=values, lengths=lengths)).values().sum().backward()

    return step


def _ddp(rank: int, size: int, request: Any) -> Step:
    """Every worker has the whole table, and all-reduces its dense gradient."""
    dense = nn.ModuleDict(
        {name: nn.EmbeddingBag(request["rows"], request["width"], mode="sum") for name in _names(request)}
    )
    model = wrapped(_Bags(dense))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step(batch: dict[str, Tensor]) -> None:
        _loss(model(batch)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Bags(nn.Module):
    """Plain tables."""

    def __init__(self, tables: nn.ModuleDict) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A row for each sample, from every table."""
        return {name: table(batch[name]) for name, table in self.tables.items()}


SIDES: dict[str, Callable[[int, int, Any], Step]] = {
    "paceline": _ours,
    "torchrec": _torchrec,
    "ddp": _ddp,
}
