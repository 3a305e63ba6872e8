"""What the workers of one line exchange: blocks of a dimension, gathered, or reduced to who owns them.

Every worker sends straight to every other, and nothing is padded: blocks may differ in length, and the bytes
are those of a ring, (M-1)/M of the whole for each of M workers. Sums are taken in the order of ranks, so that
all workers, and every repetition, get the same bits. (The line of `sequence/` pads to equal pieces and uses
collectives: a sequence's parts are equally long, and cross the line at every switch.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.mesh import Mesh

TAG = 70


class BlockLine:
    """One worker's place among those that share layers."""

    def __init__(self, mesh: Mesh, axis: str = "model") -> None:
        self._mesh, self._axis = mesh, axis
        self.size, self.index = mesh.size(axis), mesh.index(axis)
        self._ranks = mesh.ranks(axis)
        self.sent_bytes = 0
        """By this worker, so far."""
        self.synchronisations = 0
        """Gathers, reductions and sums so far."""

    def swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send to each other worker its tensor, and get each one's; what is at one's own place stays."""
        others = [each for each in range(self.size) if each != self.index]
        size_bytes = sum(outgoing[k].numel() * outgoing[k].element_size() for k in others)
        self.sent_bytes += size_bytes
        with self._mesh.exchange(self._axis, size_bytes):
            coming = [dist.irecv(incoming[k], self._ranks[k], tag=TAG) for k in others if incoming[k].numel()]
            sent = [dist.isend(outgoing[k], self._ranks[k], tag=TAG) for k in others if outgoing[k].numel()]
            for work in (*coming, *sent):
                assert work is not None
                work.wait()

    def same(self, tensor: Tensor) -> None:
        """Let all have what the first has."""
        if self.size > 1:
            dist.broadcast(tensor, self._ranks[0], group=self._mesh.group(self._axis))

    # -- what is made of it -------------------------------------------------------------------

    def gather(self, own: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """The whole, of blocks with these lengths in `dim`."""
        self.synchronisations += 1
        own = own.contiguous()
        blocks = [own if k == self.index else _block(own, dim, size) for k, size in enumerate(sizes)]
        self.swap([own] * self.size, blocks)
        return torch.cat(blocks, dim)

    def reduce_scatter(self, partial: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """The sum of all workers' partial results, this worker's block of it."""
        self.synchronisations += 1
        blocks = [block.contiguous() for block in torch.split(partial, list(sizes), dim)]
        mine = blocks[self.index]
        parts = [mine if k == self.index else torch.empty_like(mine) for k in range(self.size)]
        self.swap(blocks, parts)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all workers' partial results."""
        flat = partial.reshape(-1)
        sizes = even(flat.numel(), self.size)
        made = self.gather(self.reduce_scatter(flat, sizes, 0), sizes, 0).view(partial.shape)
        self.synchronisations -= 1  # both together are one
        return made


def even(count: int, workers: int) -> list[int]:
    """Lengths of blocks that differ by one at most."""
    size, more = divmod(count, workers)
    return [size + (k < more) for k in range(workers)]


def _block(like: Tensor, dim: int, size: int) -> Tensor:
    shape = list(like.shape)
    shape[dim] = size
    return like.new_empty(shape)
