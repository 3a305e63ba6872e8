"""One lookup of a group: ids go to their owners and sums of rows come back; gradients go as the ids went.

Three exchanges between the workers of a group (how much there is, ids, sums) and one in backward. A worker
that is alone in its group has none. Rows of one sample are added up by their owner; where a table is split by
rows, every owner sends what it has of a sample, and the sample's worker adds that up: as many bytes as a
reduce-scatter. The gradient stays with the owner, as rows and values, added up over duplicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import BadGradient
from paceline.parallel.embedding.arenas import Arena
from paceline.parallel.embedding.meter import LookupMeter
from paceline.parallel.embedding.routing import OwnerParcel
from paceline.parallel.mesh import Mesh
from paceline.protocols.grid import Grid


class ShardGroup:
    """The workers of a group, as one of them sees them."""

    def __init__(self, mesh: Grid) -> None:
        self.size, self.index = mesh.size("shard"), mesh.index("shard")
        self._mesh = mesh if isinstance(mesh, Mesh) else None

    def exchange(self, given: Tensor, to: Sequence[int], come: Sequence[int]) -> Tensor:
        """Give everybody so many numbers, and get so many from everybody."""
        if self._mesh is None or self.size == 1:
            return given
        got = given.new_empty(sum(come))
        with self._mesh.exchange("shard", (sum(to) - to[self.index]) * given.element_size()):
            dist.all_to_all_single(got, given, list(come), list(to), group=self._mesh.group("shard"))
        return got


class LookupRequest:
    """What an owner was asked for in one lookup, by arena."""

    def __init__(
        self, arenas: Sequence[Arena], batches: list[int], rows: list[Tensor], lengths: list[Tensor]
    ) -> None:
        self.arenas, self.batches = arenas, batches
        self.rows, self.lengths = rows, lengths
        self.offsets = [torch.cumsum(each, 0, dtype=torch.int32) - each for each in lengths]

    @property
    def gives(self) -> list[int]:
        """Numbers that each worker gets from here."""
        wide = sum(arena.width * len(arena.seats) for arena in self.arenas)
        return [batch * wide for batch in self.batches]

    def share(self, peer: int) -> float:
        """Of a worker's mean gradient in that of the group."""
        return self.batches[peer] / max(1, sum(self.batches))


def ask(
    line: ShardGroup, all_arenas: Sequence[Sequence[Arena]], parcels: list[OwnerParcel], batch: int
) -> LookupRequest:
    """Send everybody what they need to know; what I was asked for myself."""
    mine = all_arenas[line.index]
    heads = torch.tensor([number for each in parcels for number in (batch, *each.counts)])
    told = line.exchange(heads, [1 + len(each.counts) for each in parcels], [1 + len(mine)] * line.size).view(
        line.size, -1
    )
    counts = [[int(n) for n in row] for row in told.tolist()]
    batches = [row[0] for row in counts]
    seats = sum(len(arena.seats) for arena in mine)
    come = [row[0] * seats + sum(row[1:]) for row in counts]
    numbers = torch.cat([tensor for each in parcels for tensor in each.numbers])
    to = [sum(len(tensor) for tensor in each.numbers) for each in parcels]
    got = line.exchange(numbers, to, come)
    return _sorted_out(mine, batches, counts, got)


def _sorted_out(
    mine: Sequence[Arena], batches: list[int], counts: list[list[int]], got: Tensor
) -> LookupRequest:
    """By arena, then by who asks: rows, and how many of them each sample has."""
    cuts = [
        size
        for batch, row in zip(batches, counts, strict=True)
        for size in (*(batch * len(arena.seats) for arena in mine), *row[1:])
    ]
    parts, step = torch.split(got, cuts), 2 * len(mine)
    rows = [_joined(parts[len(mine) + index :: step]) for index in range(len(mine))]
    return LookupRequest(mine, batches, rows, [_joined(parts[index::step]) for index in range(len(mine))])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class LookupCall(NamedTuple):
    """One lookup of one worker."""

    line: ShardGroup
    asked: LookupRequest
    come: list[int]
    """Numbers that each owner gives back."""
    weights: Sequence[nn.Parameter]
    dtype: torch.dtype
    meter: LookupMeter


class Lookup(torch.autograd.Function):
    """From the arenas to what this worker's samples get, as one row of numbers, owner after owner."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: LookupCall) -> Tensor:
        """Every owner looks up for all, then all exchange. `anchor` has backward called."""
        ctx.call, asked = call, call.asked
        began = perf_counter()
        sums = [
            torch.embedding_bag(weight, rows, offsets, False, 0, False)[0]
            for weight, rows, offsets in zip(call.weights, asked.rows, asked.offsets, strict=True)
        ]
        given = _by_peer(asked, sums) if sums else torch.empty(0, dtype=call.dtype)
        call.meter.looked_up(sum(map(len, asked.rows)), perf_counter() - began)
        return call.line.exchange(given, asked.gives, call.come)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        """Gradients go to the owners, who keep them with the rows they belong to."""
        call: LookupCall = ctx.call
        line, asked, gradient = call.line, call.asked, gradients[0].contiguous()
        if line.size > 1:
            gradient = gradient * asked.share(line.index)
        got = line.exchange(gradient, call.come, asked.gives)
        parts = _by_arena(asked, got)
        for weight, part, rows, lengths in zip(call.weights, parts, asked.rows, asked.lengths, strict=True):
            if len(rows):
                _keep(weight, *add_up(rows, lengths, part))
        return None, None


def _by_peer(asked: LookupRequest, sums: list[Tensor]) -> Tensor:
    """What each worker gets in one piece: arena after arena."""
    if len(sums) == 1:
        return sums[0].view(-1)
    cut = [
        torch.split(each, [batch * len(arena.seats) for batch in asked.batches])
        for arena, each in zip(asked.arenas, sums, strict=True)
    ]
    return torch.cat([part[peer].reshape(-1) for peer in range(len(asked.batches)) for part in cut])


def _by_arena(asked: LookupRequest, got: Tensor) -> list[Tensor]:
    """The other way round."""
    if len(asked.arenas) == 1:
        return [got.view(-1, asked.arenas[0].width)]
    cuts = [batch * len(arena.seats) * arena.width for batch in asked.batches for arena in asked.arenas]
    parts, step = torch.split(got, cuts), len(asked.arenas)
    return [
        torch.cat([part.view(-1, arena.width) for part in parts[index::step]])
        for index, arena in enumerate(asked.arenas)
    ]


def add_up(rows: Tensor, lengths: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that were named, each once and in order, and the sum of their samples' gradients."""
    ordered, places = torch.sort(rows)
    once, counts = torch.unique_consecutive(ordered, return_counts=True)
    if len(rows) != len(lengths) or not bool((lengths == 1).all()):
        places = torch.repeat_interleave(lengths)[places]
    begins = torch.cumsum(counts, 0) - counts
    return once.long(), torch.embedding_bag(gradient, places, begins, False, 0, False)[0]


def _keep(weight: nn.Parameter, rows: Tensor, values: Tensor) -> None:
    """As the gradient of a parameter, on top of what is there."""
    if not bool(torch.isfinite(values.sum())):
        raise BadGradient(
            "NaN or infinity in the gradient of an embedding table; nothing was applied. Lower the learning "
            "rate, or look at the loss."
        )
    made = torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, weight.shape, is_coalesced=True, check_invariants=False
    )
    weight.grad = made if weight.grad is None else (weight.grad + made).coalesce()
