"""Cases of embedding tables for tests: their ids, their loss, and the same training in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.embedding.arenas import _block
from paceline.parallel.embedding.planner import Table


@dataclass
class Case:
    """One training."""

    axes: dict[str, int]
    tables: list[dict[str, Any]]
    optimizer: str = "sgd"
    lr: float = 0.1
    every: int = 1
    steps: int = 3
    batch: int = 4
    pattern: str = "random"
    """`random`: every worker its own ids and targets; `equal`: all groups the same; `one`: in each step one
    group has ids, the others have none; `none`: nobody has; `uneven`: batches differ by rank."""
    moment_scale: float | str = 1.0
    delay: bool = False
    at_last: bool = False
    """Whether copies are made equal after the last step."""
    linear: bool = False
    """Whether the loss is: then gradients do not depend on weights."""
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False


def ids_of(case: Case, step: int, place: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What one worker has in one step: ids and what is wanted of each sample."""
    group, index = place.get("data", 0), place.get("shard", 0)
    seen = 0 if case.pattern == "equal" else group
    draw = torch.Generator().manual_seed(1000 * step + 10 * seen + index)
    batch = case.batch + (group + 2 * index if case.pattern == "uneven" else 0)
    silent = case.pattern == "none" or (case.pattern == "one" and step % case.axes.get("data", 1) != group)
    ids: dict[str, Any] = {}
    targets: dict[str, Tensor] = {}
    for table in case.tables:
        lengths = torch.randint(0, 4, (batch,), generator=draw) * (0 if silent else 1)
        flat = torch.randint(0, table["rows"] - 1, (int(lengths.sum()),), generator=draw)
        ids[table["name"]] = (flat, torch.cumsum(lengths, 0) - lengths)
        targets[table["name"]] = torch.randn(batch, table["width"], generator=draw, dtype=torch.float64)
    return ids, targets


def loss_of(out: Mapping[str, Tensor], targets: Mapping[str, Tensor], linear: bool = False) -> Tensor:
    """The mean over a worker's samples. Linear: gradients do not depend on weights."""
    total = torch.zeros((), dtype=torch.float64)
    for name, each in out.items():
        apart = each * targets[name] if linear else (each - targets[name]).square()
        total = total + apart.sum(1).mean()
    return total


def first_weights(case: Case) -> dict[int, Tensor]:
    return {index: _block(Table(**table), 0, 0, torch.float64) for index, table in enumerate(case.tables)}


def places(axes: Mapping[str, int]) -> list[dict[str, int]]:
    return [
        {"data": group, "shard": index}
        for group in range(axes.get("data", 1))
        for index in range(axes.get("shard", 1))
    ]


class Copy:
    """One group's tables, dense, in one process."""

    def __init__(self, case: Case, blocks: int) -> None:
        self.weights = first_weights(case)
        self.v = {i: torch.zeros(len(w), blocks, dtype=torch.float64) for i, w in self.weights.items()}
        self.synced = {i: v.clone() for i, v in self.v.items()}
        self._case, self._blocks = case, blocks

    def step(self, gradients: dict[int, Tensor], seen: dict[int, Tensor]) -> None:
        """`seen`: of each table 1 for the rows that were looked up, else 0."""
        for index, g in gradients.items():
            if self._case.optimizer == "sgd":
                self.weights[index] = self.weights[index] - self._case.lr * g
            else:
                self._adagrad(index, g, self._case.weight_decay * seen[index].unsqueeze(1))

    def _adagrad(self, index: int, g: Tensor, decay: Tensor) -> None:
        before = self.weights[index]
        if not self._case.decoupled_weight_decay:
            g = g + decay * before
        else:
            self.weights[index] = (1 - self._case.lr * decay) * before
        cut = g.view(len(g), self._blocks, -1)
        v = self.v[index] = self.v[index] + cut.square().mean(2)
        used = torch.where(self.synced[index] > 0, self.synced[index], v) if self._case.delay else v
        rate = self._case.lr / ((used / scale_of(self._case)).sqrt() + 1e-8)
        self.weights[index] = self.weights[index] - (cut * rate.unsqueeze(2)).view_as(g)


def scale_of(case: Case) -> float:
    return float(case.axes.get("data", 1) if case.moment_scale == "groups" else case.moment_scale)


def reference(case: Case, blocks: int = 1) -> list[Copy]:
    """2D sparse parallelism as the paper has it, in one process with dense gradients; a copy per group.

    Plain PyTorch: nn.functional.embedding_bag, and the formulas written out.
    """
    groups = case.axes.get("data", 1)
    copies = [Copy(case, blocks) for _ in range(groups)]
    for step in range(case.steps):
        for group, copy in enumerate(copies):
            copy.step(mean_gradient(case, copy.weights, step, [group]), looked_up(case, step, [group]))
        if (step + 1) % case.every == 0 or (case.at_last and step + 1 == case.steps):
            _average(copies)
    return copies


def _average(copies: list[Copy]) -> None:
    for index in copies[0].weights:
        w = sum((copy.weights[index] for copy in copies), start=torch.zeros(())) / len(copies)
        v = sum((copy.v[index] for copy in copies), start=torch.zeros(())) / len(copies)
        for copy in copies:
            copy.weights[index], copy.v[index], copy.synced[index] = w.clone(), v.clone(), v.clone()


def one_process(case: Case) -> Copy:
    """Training on the mean gradient of all samples: what full model parallel computes."""
    copy = Copy(case, 1)
    for step in range(case.steps):
        copy.step(mean_gradient(case, copy.weights, step), looked_up(case, step))
    return copy


def looked_up(case: Case, step: int, groups: list[int] | None = None) -> dict[int, Tensor]:
    """Of each table: 1 for the rows that one of these groups has ids of, else 0."""
    seen = {index: torch.zeros(table["rows"]).double() for index, table in enumerate(case.tables)}
    for place in places(case.axes):
        if groups is None or place["data"] in groups:
            ids, _ = ids_of(case, step, place)
            for index, table in enumerate(case.tables):
                seen[index][ids[table["name"]][0]] = 1.0
    return seen


def mean_gradient(
    case: Case, weights: dict[int, Tensor], step: int, groups: list[int] | None = None
) -> dict[int, Tensor]:
    """Of all samples of these groups."""
    ws = {index: weight.clone().requires_grad_() for index, weight in weights.items()}
    total, samples = torch.zeros((), dtype=torch.float64), 0
    for place in places(case.axes):
        if groups is None or place["data"] in groups:
            ids, targets = ids_of(case, step, place)
            batch = len(next(iter(targets.values())))
            total = total + batch * loss_of(pooled(case, ws, ids), targets, case.linear)
            samples += batch
    (total / samples).backward()
    return {index: w.grad for index, w in ws.items() if w.grad is not None}


def pooled(case: Case, weights: Mapping[int, Tensor], ids: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        table["name"]: torch.nn.functional.embedding_bag(
            ids[table["name"]][0], weights[index], ids[table["name"]][1], mode=table.get("pooling", "sum")
        )
        for index, table in enumerate(case.tables)
    }
