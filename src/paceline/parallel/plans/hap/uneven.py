"""Collectives on pieces of unequal length, each with its adjoint as the backward pass.

Shards that are cut by ratios never go into a DTensor: it takes them for pieces of `torch.chunk` and
returns wrong data without an error. Here the lengths of all ranks go along. Two ways to move pieces:
padded to the longest one and moved at once, or one message of true length per rank, all in flight
together (*grouped*)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.plan.hap.costs import TOGETHER_BYTES

Lengths = Sequence[int]
IN_FLIGHT = 8
"""So many messages at a time."""
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""New names of newer versions of torch, which warn of the old ones."""


def cut(tensor: Tensor, dim: int, lengths: Lengths, rank: int) -> Tensor:
    """This rank's slice."""
    return tensor.narrow(dim, sum(lengths[:rank]), lengths[rank])


def gather_pieces(local: Tensor, dim: int, lengths: Lengths, variant: str = "padded") -> Tensor:
    """All ranks' slices, put together."""
    front = local.movedim(dim, 0).contiguous()
    made = _gather_grouped(front, lengths) if variant == "grouped" else _gather_padded(front, lengths)
    return made.movedim(0, dim).contiguous()


def _gather_padded(front: Tensor, lengths: Lengths) -> Tensor:
    longest = max(lengths)
    padded = front.new_zeros((longest, *front.shape[1:]))
    padded[: front.shape[0]] = front
    every = front.new_empty((longest * len(lengths), *front.shape[1:]))
    gather_into(every, padded)
    return torch.cat([every[r * longest : r * longest + length] for r, length in enumerate(lengths)])


def _gather_grouped(front: Tensor, lengths: Lengths) -> Tensor:
    rank = dist.get_rank()
    pieces = [front if r == rank else front.new_empty((n, *front.shape[1:])) for r, n in enumerate(lengths)]
    works = [dist.broadcast(p, r, async_op=True) for r, p in enumerate(pieces) if p.numel()]
    for work in works:
        work.wait()
    return torch.cat(pieces)


def scatter_sum(full: Tensor, dim: int, lengths: Lengths, variant: str = "padded") -> Tensor:
    """This rank's slice of the sum over ranks."""
    front = full.movedim(dim, 0).contiguous()
    made = _scatter_grouped(front, lengths) if variant == "grouped" else _scatter_padded(front, lengths)
    return made.movedim(0, dim).contiguous()


def _scatter_padded(front: Tensor, lengths: Lengths) -> Tensor:
    longest, rank = max(lengths), dist.get_rank()
    padded = front.new_zeros((longest * len(lengths), *front.shape[1:]))
    for r, piece in enumerate(front.split(list(lengths))):  # type: ignore[no-untyped-call]
        padded[r * longest : r * longest + len(piece)] = piece
    mine = front.new_empty((longest, *front.shape[1:]))
    scatter_into(mine, padded)
    return mine[: lengths[rank]]


def _scatter_grouped(front: Tensor, lengths: Lengths) -> Tensor:
    pieces = [piece.clone() for piece in front.split(list(lengths))]  # type: ignore[no-untyped-call]
    works = [dist.reduce(p, r, async_op=True) for r, p in enumerate(pieces) if p.numel()]
    for work in works:
        work.wait()
    mine: Tensor = pieces[dist.get_rank()]
    return mine


def sum_all(tensor: Tensor) -> Tensor:
    """The sum over ranks, for all."""
    made = tensor.contiguous().clone()
    dist.all_reduce(made)
    return made


def add_up(tensors: Sequence[Tensor]) -> None:
    """Replace each by its sum over ranks: large ones in place, small ones together, so that a message's
    latency is paid once for many. A few at a time, since what travels together is a copy."""
    waiting = buckets(tensors)
    for place in range(0, len(waiting), IN_FLIGHT):
        works = [_add_up(bucket) for bucket in waiting[place : place + IN_FLIGHT]]
        for finish in works:
            finish()


def add_up_gradients(parameters: Sequence[Tensor]) -> None:
    """The same for gradients. Where nobody has one there is none afterwards: zeros would be stepped with,
    and momentum and weight decay would move what one process leaves alone."""
    if not parameters:
        return
    told = [float(parameter.grad is not None) for parameter in parameters]
    for parameter in parameters:
        if parameter.grad is None:  # somebody else may have one
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    there = torch.tensor(told, dtype=gradients[-1].dtype)  # so that both travel together
    add_up([*gradients, there])
    for parameter, ranks in zip(parameters, there.tolist(), strict=True):
        if not ranks:
            parameter.grad = None


def same_on_all(number: int) -> Callable[[], bool]:
    """Whether all ranks have this number. Starts; what is returned ends it, and tells."""
    told = torch.tensor([number, -number])
    work = dist.all_reduce(told, dist.ReduceOp.MAX, async_op=True)

    def finish() -> bool:
        work.wait()
        return bool(told[0] == -told[1])

    return finish


def _add_up(bucket: list[Tensor]) -> Callable[[], None]:
    """Starts; what is returned ends it."""
    alone = len(bucket) == 1 and bucket[0].is_contiguous()
    flat = bucket[0] if alone else torch.cat([tensor.reshape(-1) for tensor in bucket])
    work = dist.all_reduce(flat, async_op=True)

    def finish() -> None:
        work.wait()
        if not alone:
            sizes = [tensor.numel() for tensor in bucket]
            for tensor, total in zip(bucket, flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                tensor.copy_(total.view_as(tensor))

    return finish


def buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one type, together."""
    made: list[list[Tensor]] = []
    filled = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not made or filled + size > TOGETHER_BYTES or made[-1][0].dtype != tensor.dtype:
            made.append([])
            filled = 0
        made[-1].append(tensor)
        filled += size
    return made


def exchange(local: Tensor, old: int, old_lengths: Lengths, new: int, new_lengths: Lengths) -> Tensor:
    """From slices of one dimension to slices of another."""
    rank = dist.get_rank()
    parts = [p.contiguous() for p in local.split(list(new_lengths), dim=new)]  # type: ignore[no-untyped-call]
    shapes = []
    for length in old_lengths:
        shape = list(parts[rank].shape)
        shape[old] = length
        shapes.append(shape)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = local.new_empty(sum(sizes))
    sent = torch.cat([part.reshape(-1) for part in parts])
    dist.all_to_all_single(received, sent, sizes, [part.numel() for part in parts])
    pieces = [p.view(shape) for p, shape in zip(received.split(sizes), shapes, strict=True)]  # type: ignore[no-untyped-call]
    return torch.cat(pieces, dim=old)


# -- the same with their adjoints -------------------------------------------------------------


class AllGather(torch.autograd.Function):
    """Slices -> all; backward adds up and scatters."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, lengths: Lengths, variant: str) -> Tensor:
        ctx.how = dim, lengths, variant
        return gather_pieces(local, dim, lengths, variant)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return scatter_sum(grads[0], *ctx.how), None, None, None


class ReduceScatter(torch.autograd.Function):
    """Summands -> slices of the sum; backward gathers."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, dim: int, lengths: Lengths, variant: str) -> Tensor:
        ctx.how = dim, lengths, variant
        return scatter_sum(full, dim, lengths, variant)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return gather_pieces(grads[0], *ctx.how), None, None, None


class UnevenAllReduce(torch.autograd.Function):
    """Summands -> the sum; backward adds up as well."""

    @staticmethod
    def forward(ctx: Any, full: Tensor) -> Tensor:
        return sum_all(full)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return sum_all(grads[0])


class Slice(torch.autograd.Function):
    """All -> one's own slice; backward pads with zeros."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, dim: int, lengths: Lengths) -> Tensor:
        ctx.how = dim, lengths, full.shape
        return cut(full, dim, lengths, dist.get_rank()).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dim, lengths, shape = ctx.how
        padded = grads[0].new_zeros(shape)
        cut(padded, dim, lengths, dist.get_rank()).copy_(grads[0])
        return padded, None, None


class UnevenAllToAll(torch.autograd.Function):
    """Slices of one dimension -> slices of another; backward goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, old: int, old_lengths: Lengths, new: int, new_lengths: Lengths
    ) -> Tensor:
        ctx.back = new, new_lengths, old, old_lengths
        return exchange(local, old, old_lengths, new, new_lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return exchange(grads[0].contiguous(), *ctx.back), None, None, None, None


class Collect(torch.autograd.Function):
    """The result, whole, for everybody. All then compute the same loss, so the gradient is taken as it comes:
    one's own slice of it; all of it for a summand; a share of it for what all have."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, held: str, lengths: Lengths, variant: str) -> Tensor:
        ctx.how = held, lengths
        if held == "I":
            return local.clone()
        return sum_all(local) if held == "R" else gather_pieces(local, int(held[1:]), lengths, variant)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        held, lengths = ctx.how
        if held == "I":
            return grads[0] / dist.get_world_size(), None, None, None
        if held == "R":
            return grads[0], None, None, None
        return cut(grads[0], int(held[1:]), lengths, dist.get_rank()).contiguous(), None, None, None
