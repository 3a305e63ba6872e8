"""What every rank of the tests of embedding tables does; started by `run_ranks`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.parallel.embedding import EmbeddingTables, RowWiseAdagrad, Table
from paceline.parallel.mesh import Mesh
from support.embeddings import Case, ids_of, loss_of

COLLECTIVES = ("all_to_all_single", "all_reduce", "all_gather")


def everything(rank: int, size: int, request: Any) -> Any:
    """All cases in one go: starting processes is what takes the time."""
    meshes: dict[str, Mesh] = {}
    answers = []
    for given in request["cases"]:
        case = Case(**given)
        key = str(case.axes)
        if key not in meshes:
            places = torch.arange(size).reshape(tuple(case.axes.values()))
            made = DeviceMesh("cpu", places, mesh_dim_names=tuple(case.axes))
            meshes[key] = Mesh(case.axes, rank, made)
        answers.append(_train(meshes[key], case))
    return answers


def _train(mesh: Mesh, case: Case) -> dict[str, Any]:
    tables = EmbeddingTables(
        mesh, [Table(**each) for each in case.tables], every=case.every, dtype=torch.float64
    )
    optimizer = optimizer_of(case, tables)
    tables.trained_by(optimizer)
    sent: dict[str, int] = {}
    mesh.sent = lambda axis, size: sent.update({axis: sent.get(axis, 0) + size})
    mesh.shares.clear()
    with Audit() as audit:
        outputs = [_step(mesh, case, tables, optimizer, step) for step in range(case.steps)]
        if case.at_last:
            tables.sync()
    return {
        "place": mesh.place(mesh.rank),
        "pieces": pieces_of(tables),
        "syncs": tables.syncs,
        "calls": audit.calls,
        "sent": sent,
        "outputs": outputs,
        "dense": [weight.grad is not None and not weight.grad.is_sparse for weight in tables.weights],
    }


def _step(mesh: Mesh, case: Case, tables: EmbeddingTables, optimizer: Any, step: int) -> Any:
    ids, targets = ids_of(case, step, mesh.place(mesh.rank))
    optimizer.zero_grad()
    out = tables(ids)
    loss_of(out, targets, case.linear).backward()
    optimizer.step()
    return {name: each.detach().tolist() for name, each in out.items()} if step == 0 else None


def optimizer_of(case: Case, tables: EmbeddingTables) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(tables.weights, lr=case.lr)
    return RowWiseAdagrad(
        tables.weights,
        lr=case.lr,
        moment_scale=case.moment_scale,
        delay=case.delay,  # type: ignore[arg-type]
        weight_decay=case.weight_decay,
        decoupled_weight_decay=case.decoupled_weight_decay,
    )


def pieces_of(tables: EmbeddingTables) -> list[Any]:
    """Of every shard: where it is, its weights and its moments."""
    made = []
    for arena, weight in zip(tables.arenas, tables.weights, strict=True):
        moment = tables.moments(weight).get("sum")
        for seat in arena.seats:
            shard, at = seat.shard, slice(seat.base, seat.base + seat.shard.rows)
            v = None if moment is None else moment[at].tolist()
            made.append([shard.table, shard.first_row, shard.first_column, weight[at].tolist(), v])
    return made


class Audit:
    """Writes down every collective operation: which, and among which ranks."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []

    def __enter__(self) -> Audit:
        self._real = {name: getattr(dist, name) for name in COLLECTIVES}
        for name in COLLECTIVES:
            setattr(dist, name, self._watched(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(dist, name, real)

    def _watched(self, name: str) -> Any:
        def call(*args: Any, group: Any = None, **more: Any) -> Any:
            self.calls.append((name, dist.get_process_group_ranks(group)))
            return self._real[name](*args, group=group, **more)

        return call


def whole(answers: list[dict[str, Any]], group: int = 0) -> dict[int, Tensor]:
    """The tables of a group, put together."""
    parts: dict[int, dict[tuple[int, int], Tensor]] = {}
    for answer in answers:
        if answer["place"].get("data", 0) == group:
            for table, row, column, weight, _ in answer["pieces"]:
                parts.setdefault(table, {})[row, column] = torch.tensor(weight, dtype=torch.float64)
    return {table: _joined(pieces) for table, pieces in parts.items()}


def moments(answers: list[dict[str, Any]], group: int = 0) -> dict[int, Tensor]:
    """The moments of tables that are not split by columns."""
    parts: dict[int, dict[int, Tensor]] = {}
    for answer in answers:
        if answer["place"].get("data", 0) == group:
            for table, row, column, _, v in answer["pieces"]:
                assert column == 0
                parts.setdefault(table, {})[row] = torch.tensor(v, dtype=torch.float64)
    return {table: torch.cat([part[row] for row in sorted(part)]) for table, part in parts.items()}


def _joined(pieces: dict[tuple[int, int], Tensor]) -> Tensor:
    rows = sorted({row for row, _ in pieces})
    return torch.cat([torch.cat([pieces[at] for at in sorted(pieces) if at[0] == row], 1) for row in rows])
