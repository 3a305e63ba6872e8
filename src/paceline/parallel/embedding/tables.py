"""Embedding tables split over the workers of a group and copied over groups: 2D sparse parallelism.

Paper: Zhang et al., "Two-dimensional Sparse Parallelism for Large Scale Deep Learning Recommendation Model
Training" (arXiv 2508.03854). Inside a group (the axis `shard` of a mesh) every table is split; across groups
(the axis `data`) the shards are copied, and their weights averaged every k steps. Every worker brings samples
of its own. Alone, on a mesh of one place, the same module is a set of plain tables.

Where we differ: a gradient waits for `optimizer.step()` as rows and values, so that batches can be
accumulated and rates scheduled; TorchRec updates in the middle of backward. Both never make a dense gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.parallel.embedding.arenas import arenas_of, fill
from paceline.parallel.embedding.lookup import Call, Line, Lookup, ask
from paceline.parallel.embedding.meter import Meter
from paceline.parallel.embedding.planner import Placement, Table, place
from paceline.parallel.embedding.routing import Bags, Ids, parcel, read_bags
from paceline.parallel.embedding.rowwise import RowWiseAdagrad, check_optimizer
from paceline.parallel.embedding.syncing import Copies
from paceline.protocols.grid import Grid

AXES = ("data", "shard")
UNTRAINED = (
    "nobody trains the embedding tables. Call tables.trained_by(RowWiseAdagrad(tables.weights, lr=0.05)), or "
    "SGD in its place, before pace.prepare() and the first batch."
)


class EmbeddingTables(nn.Module):
    """The tables of a model. Called with a batch's ids, it gives each sample the sum or mean of its rows."""

    def __init__(
        self,
        mesh: Grid,
        tables: Sequence[Table],
        *,
        every: int = 1,
        budget_bytes: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`every`: steps between two synchronisations of the copies; `budget_bytes`: what one worker has for
        tables, None: as much as it takes. The same seed gives the same first weights, however split."""
        super().__init__()
        _check(mesh, dtype)
        self.placement: Placement = place(tables, mesh.size("shard"), budget_bytes, dtype.itemsize)
        self.groups = mesh.size("data")
        self.sent: Callable[[str, int], None] = lambda axis, size: None
        """Told of bytes that went along an axis."""
        self.meter = Meter()
        self._every, self._dtype = every, dtype
        self._arenas = [arenas_of(self.placement, owner) for owner in range(mesh.size("shard"))]
        self._line = Line(
            _group(mesh, "shard"),
            mesh.size("shard"),
            mesh.index("shard"),
            lambda size: self.sent("shard", size),
        )
        self.arenas = self._arenas[mesh.index("shard")]
        """Where this worker's shards lie."""
        self.weights = tuple(self._made(seed))
        """For an optimizer of their own: they are not among `model.parameters()`, their gradients are sparse."""
        self._copies = Copies(
            _group(mesh, "data"), self.groups, self.weights, every, lambda size: self.sent("data", size)
        )
        self._anchor = torch.zeros((), requires_grad=True)
        self._optimizer: torch.optim.Optimizer | None = None
        self._samples = 0

    def _made(self, seed: int) -> list[nn.Parameter]:
        made = [torch.empty(arena.rows, arena.width, dtype=self._dtype) for arena in self.arenas]
        for arena, weight in zip(self.arenas, made, strict=True):
            fill(arena, self.placement.tables, weight, seed)
        return [nn.Parameter(weight) for weight in made]

    # -- lookup -------------------------------------------------------------------------------

    def forward(self, features: Mapping[str, Ids]) -> dict[str, Tensor]:
        """For every table a row for each sample. All workers of the group come here at once.

        Ids are a tensor with a row for each sample, or (ids, offsets) as for `nn.EmbeddingBag`.
        """
        training = torch.is_grad_enabled()
        if training and self._optimizer is None:
            raise ConfigError(UNTRAINED)
        with self.meter.lookup():
            tables = self.placement.tables
            bags, batch = read_bags(tables, features)
            parcels = [parcel(arenas, tables, bags) for arenas in self._arenas]
            asked = ask(self._line, self._arenas, parcels, batch)
            come = [batch * sum(a.width * len(a.seats) for a in arenas) for arenas in self._arenas]
            call = Call(self._line, asked, come, self.weights, self._dtype, self.meter)
            got = Lookup.apply(self._anchor, call)  # type: ignore[no-untyped-call]
        self._samples += sum(asked.batches) if training else 0
        return self._put_together(got, bags, batch)

    def _put_together(self, got: Tensor, bags: list[Bags], batch: int) -> dict[str, Tensor]:
        """Parts of rows are added up, parts of columns put side by side."""
        seats = [(seat, a.width) for arenas in self._arenas for a in arenas for seat in a.seats]
        parts = torch.split(got, [batch * width for _, width in seats])
        found: list[list[tuple[tuple[int, int], Tensor]]] = [[] for _ in self.placement.tables]
        for (seat, width), part in zip(seats, parts, strict=True):
            at = seat.shard.first_row, seat.shard.first_column
            found[seat.shard.table].append((at, part.view(batch, width)))
        whole: dict[str, Tensor] = {}
        for table, bag, pieces in zip(self.placement.tables, bags, found, strict=True):
            ordered = [part for _, part in sorted(pieces, key=lambda piece: piece[0])]
            wide = ordered[0].shape[1] < table.width
            pooled = torch.cat(ordered, 1) if wide else _sum(ordered)
            whole[table.name] = pooled if table.pooling == "sum" else pooled / _lengths(bag, pooled)
        return whole

    # -- training -----------------------------------------------------------------------------

    def trained_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Every step of this optimizer counts: the copies are synchronised after every k of them."""
        own = {id(weight) for weight in self.weights}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if {id(p) for p in held} != own:
            raise ConfigError(
                "embedding tables have an optimizer of their own: give it tables.weights, nothing else."
            )
        check_optimizer(optimizer)
        if self._optimizer is not None:
            raise ConfigError("the embedding tables have an optimizer already.")
        if isinstance(optimizer, RowWiseAdagrad):
            optimizer.groups = self.groups
        self._optimizer = optimizer
        optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _stepped(self) -> None:
        self._copies.stepped(self._samples, self.moments)
        self._samples = 0

    def sync(self) -> None:
        """Make all copies equal now, whatever `every` says; all workers come here. Before one is saved."""
        self._copies.sync(self.moments)

    @property
    def syncs(self) -> int:
        """How often copies were made equal."""
        return self._copies.syncs

    def moments(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """What the optimizer remembers of a parameter."""
        if not isinstance(self._optimizer, RowWiseAdagrad):
            return {}
        return self._optimizer.moments(weight, self._optimizer.param_groups[0])


def _check(mesh: Grid, dtype: torch.dtype) -> None:
    if "shard" not in mesh.axes or not set(mesh.axes) <= set(AXES):
        raise ConfigError(
            f"embedding tables are split along the axis shard and copied along data, but the mesh is {mesh}. "
            "Use for instance --mesh data=2,shard=2."
        )
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"embedding tables are float32 or float64, got {dtype}. Use torch.float32.")


def _group(mesh: Grid, axis: str) -> Any:
    return None if mesh.size(axis) == 1 else mesh.group(axis)  # type: ignore[attr-defined]


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _lengths(bag: Bags, like: Tensor) -> Tensor:
    return bag.lengths.clamp(min=1).unsqueeze(1).to(like.dtype)
