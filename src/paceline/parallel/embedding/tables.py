"""Embedding tables split over the workers of a group and copied over groups: 2D sparse parallelism.

Paper: Zhang et al., "Two-dimensional Sparse Parallelism for Large Scale Deep Learning Recommendation Model
Training" (arXiv 2508.03854). Inside a group (the axis `shard` of a mesh) every table is split; across groups
(the axis `data`) the shards are copied, and their weights averaged every k steps. Every worker brings samples
of its own. Alone, on a mesh of one place, the same module is a set of plain tables.

Where we differ: a gradient waits for `optimizer.step()` as rows and values, so that batches can be
accumulated and rates scheduled; TorchRec updates in the middle of backward. Both never make a dense gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.parallel.embedding.arenas import arenas_of, fill
from paceline.parallel.embedding.lookup import Lookup, LookupCall, ShardGroup, ask
from paceline.parallel.embedding.meter import LookupMeter
from paceline.parallel.embedding.planner import Placement, Shard, Table, place
from paceline.parallel.embedding.routing import Bags, Ids, parcel, read_bags
from paceline.parallel.embedding.rowwise import RowWiseAdagrad, check_optimizer
from paceline.parallel.embedding.syncing import Copies
from paceline.parallel.mesh import Mesh, Share
from paceline.parallel.pieces import TensorPiece
from paceline.protocols.grid import Grid
from paceline.trace.events import Lookups

AXES = ("data", "shard")
UNTRAINED = (
    "no optimizer trains the embedding tables. Call tables.trained_by(RowWiseAdagrad(tables.weights, "
    "lr=0.05)), or SGD in its place, before pace.prepare() and the first batch."
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
        self.meter = LookupMeter()
        self._dtype = dtype
        self._arenas = [arenas_of(self.placement, owner) for owner in range(mesh.size("shard"))]
        self._line = ShardGroup(mesh)
        self.arenas = self._arenas[mesh.index("shard")]
        """Where this worker's shards lie."""
        self.weights = tuple(self._made(seed))
        """For an optimizer of their own: `model.parameters()` leaves them out, their gradients are sparse."""
        self._copies = Copies(mesh, self.weights, every)
        self._anchor = torch.zeros((), requires_grad=True)
        self._optimizer: torch.optim.Optimizer | None = None
        self._samples = self.steps = 0
        if isinstance(mesh, Mesh):
            mesh.split(TablesShare(self))

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
            call = LookupCall(self._line, asked, come, self.weights, self._dtype, self.meter)
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
        self._samples, self.steps = 0, self.steps + 1

    def sync(self) -> None:
        """Make all copies equal now, whatever `every` says; all workers come here. Before one is saved."""
        self._copies.sync(self.moments)

    @property
    def syncs(self) -> int:
        """How often copies were made equal."""
        return self._copies.syncs

    # -- what is saved ------------------------------------------------------------------------

    def pieces(self) -> dict[str, TensorPiece]:
        """Of every tensor of `state_dict` which part of its table it is."""
        if self._optimizer is None:
            raise ConfigError(UNTRAINED)
        return {name: _piece(self.placement.tables[shard.table], shard) for name, shard, _ in self._held()}

    def _held(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """Names, shards, and tensors: weights, and moments as wide as their shard. However tables are split,
        whole tables are saved that have the same names and shapes."""
        for arena, weight in zip(self.arenas, self.weights, strict=True):
            for seat in arena.seats:
                shard, at = seat.shard, slice(seat.base, seat.base + seat.shard.rows)
                name = self.placement.tables[shard.table].name
                yield f"{name}.weight", shard, weight.detach()[at]
                for kind, moment in self.moments(weight).items():
                    yield f"{name}.{kind}", shard, moment[at].unsqueeze(1).expand(-1, shard.columns)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({f"{prefix}{name}": tensor for name, _, tensor in self._held()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        """A moment of several columns is the mean of theirs: of equal ones, that one."""
        missing, unexpected = more[2], more[3]
        names = set()
        for name, _, tensor in self._held():
            names.add(f"{prefix}{name}")
            saved = state_dict.get(f"{prefix}{name}")
            if saved is None or saved.shape != tensor.shape:
                missing.append(f"{prefix}{name}")
            elif name.endswith(".weight"):
                tensor.copy_(saved)
            else:
                tensor[:, 0].copy_(saved.double().mean(1))
        unexpected += [name for name in state_dict if name.startswith(prefix) and name not in names]

    def moments(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """What the optimizer remembers of a parameter."""
        if not isinstance(self._optimizer, RowWiseAdagrad):
            return {}
        return self._optimizer.moments(weight, self._optimizer.param_groups[0])


class TablesShare(Share):
    """What a run on a mesh asks of the tables."""

    def __init__(self, tables: EmbeddingTables) -> None:
        super().__init__("shard", apart=True)
        self._tables, self._asked = tables, 0

    def combine(self, samples: int) -> None:
        """Gradients of tables are with their owners already; see that they are stepped with."""
        if self._tables.steps < self._asked:
            raise ConfigError(
                "the optimizer of the embedding tables was not stepped. Call its step() after the other "
                "optimizer's."
            )
        self._asked += 1

    def settle(self) -> None:
        """Copies become equal."""
        self._tables.sync()

    def left_out(self) -> tuple[int, int]:
        """All of the tables."""
        placement = self._tables.placement
        numbers = sum(table.rows * table.width for table in placement.tables)
        return numbers, numbers * placement.item_bytes

    def lookups(self) -> Lookups | None:
        """What they cost."""
        return self._tables.meter.take()


def _check(mesh: Grid, dtype: torch.dtype) -> None:
    if "shard" not in mesh.axes or not set(mesh.axes) <= set(AXES):
        raise ConfigError(
            f"embedding tables are split along the axis shard and copied along data, but the mesh is {mesh}. "
            "Use for instance --mesh data=2,shard=2."
        )
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"embedding tables are float32 or float64, got {dtype}. Use torch.float32.")


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _lengths(bag: Bags, like: Tensor) -> Tensor:
    return bag.lengths.clamp(min=1).unsqueeze(1).to(like.dtype)


def _piece(table: Table, shard: Shard) -> TensorPiece:
    whole = (table.rows, table.width)
    if shard.columns < table.width:
        return TensorPiece(whole, 1, ((shard.first_column, shard.first_column + shard.columns),), "shard")
    return TensorPiece(whole, 0, ((shard.first_row, shard.first_row + shard.rows),), "shard")
