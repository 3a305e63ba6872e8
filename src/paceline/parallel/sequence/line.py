"""The workers along a mesh's axis `sequence`, and what they exchange, with every byte counted.

Bytes are those that one worker sends to others. gloo's own reduce-scatter sends twice what it needs to (it
is an all-reduce inside), so here it is an all-to-all whose pieces are added up on arrival.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ConfigError, RunError
from paceline.parallel.mesh import Mesh
from paceline.protocols.grid import Grid

AXIS = "sequence"


class Line:
    """The workers that hold the parts of the same samples. A line of one exchanges nothing."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: Any = None,
        *,
        scaled: bool = True,
        short: bool = False,
        pad: float = 0.0,
        around: Callable[[int], AbstractContextManager[None]] = lambda size_bytes: nullcontext(),
    ) -> None:
        """`scaled`: gradients are averaged over the line afterwards, and the primitives allow for it;
        otherwise those of parameters inside the split region are to be added up, others left alone.
        `short`: a dimension may be shorter than the line; some workers then compute padding alone.
        `pad`: what padding is filled with. No result depends on it.
        `around`: put around every exchange, with the bytes that this worker sends of it.
        """
        self.rank, self.size, self.group = rank, size, group
        self.scaled, self.short, self.pad = scaled, short, pad
        self._around = around
        self.bytes: Counter[str] = Counter()
        """Sent by this worker, by kind of exchange."""
        self.calls: Counter[str] = Counter()
        self.inside = False
        """Whether a block is being computed on parts."""

    @classmethod
    def of(cls, mesh: Grid, **how: Any) -> Line:
        """The line of a mesh that this worker is on; a mesh without the axis has lines of one."""
        if mesh.size(AXIS) == 1 or not isinstance(mesh, Mesh):
            return cls(**how)
        around = partial(mesh.exchange, AXIS)
        return cls(mesh.index(AXIS), mesh.size(AXIS), mesh.group(AXIS), around=around, **how)

    @property
    def factor(self) -> int:
        """By how much gradients inside the split region have to be larger if they are averaged."""
        return self.size if self.scaled else 1

    def part(self, length: int) -> int:
        """How much of a dimension each worker holds, padding included."""
        return -(-length // self.size)

    def valid(self, length: int) -> int:
        """How much of this worker's part is no padding."""
        part = self.part(length)
        return min(part, max(0, length - self.rank * part))

    def check_length(self, dim: int, length: int) -> None:
        """Refuse a dimension that leaves workers without work."""
        if length < 1 or (length < self.size and not self.short):
            raise ConfigError(
                f"dimension {dim} has length {length}, less than the {self.size} workers along {AXIS}: some "
                f"would have nothing to compute. Use --mesh {AXIS}={max(length, 1)}, or longer sequences."
            )

    # -- exchanges ----------------------------------------------------------------------------

    def all_to_all(self, pieces: Tensor, kind: str = "all_to_all") -> Tensor:
        """Row r of `pieces` goes to worker r; row r of the result came from there."""
        got = torch.empty_like(pieces)
        with self._counted(kind, size_of(pieces) // self.size * (self.size - 1)):
            dist.all_to_all_single(got, pieces, group=self.group)
        return got

    def all_gather(self, piece: Tensor) -> Tensor:
        """Everybody's, by rank, in a new first dimension."""
        got = piece.new_empty((self.size, *piece.shape))
        with self._counted("all_gather", size_of(piece) * (self.size - 1)):
            dist.all_gather(list(got.unbind()), piece.contiguous(), group=self.group)
        return got

    def reduce_scatter(self, pieces: Tensor) -> Tensor:
        """The sum over all workers of row r of their `pieces`, for worker r."""
        return self.all_to_all(pieces, "reduce_scatter").sum(0)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum, in place. Bytes are those of a ring."""
        with self._counted("all_reduce", 2 * size_of(tensor) * (self.size - 1) // self.size):
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def broadcast(self, tensor: Tensor) -> None:
        """What the first worker has, in place. It is said once to each of the others."""
        with self._counted("broadcast", 0 if self.rank else size_of(tensor) * (self.size - 1)):
            dist.broadcast(tensor, group=self.group, group_src=0)

    def pass_on(self, tensors: Sequence[Tensor], tag: int = 0) -> Hop:
        """Send to the next worker, and get as much from the one before; it travels while one computes."""
        return Hop(self, [tensor.contiguous() for tensor in tensors], tag)

    @contextmanager
    def _counted(self, kind: str, size_bytes: int) -> Iterator[None]:
        with self._around(size_bytes):
            yield
        self.bytes[kind] += size_bytes
        self.calls[kind] += 1

    # -- what the workers of a line have in common, and what not -------------------------------

    def check_same(self, tensors: Sequence[Tensor], what: str) -> None:
        """Refuse to go on if another worker of the line holds other samples."""
        if self.size == 1:
            return
        mine = 0
        for tensor in tensors:
            numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            mine = zlib.crc32(numbers.data, mine)
        sums = self.all_gather(torch.tensor([mine])).flatten().tolist()
        if len(set(sums)) > 1:
            odd = next(rank for rank, found in enumerate(sums) if found != sums[0])
            raise RunError(
                f"workers 0 and {odd} along {AXIS} were given different {what}, but hold parts of the same "
                "samples. Use the loader that the run gives, or draw samples from the same seed on all."
            )

    @contextmanager
    def own_numbers(self, device: torch.device) -> Iterator[None]:
        """Random numbers that differ between the workers of the line, as dropout of tokens needs.

        They are drawn from the generator that all have in common, which moves on by one: what is computed
        once more in a backward pass (torch.utils.checkpoint) draws the same.
        """
        if self.size == 1:
            yield
            return
        seed = int(torch.randint(2**62, ())) + self.rank
        here = device.type == "cpu"
        with torch.random.fork_rng([] if here else [device], device_type="cuda" if here else device.type):
            torch.default_generator.manual_seed(seed)
            if not here:
                torch.get_device_module(device).manual_seed(seed)
            outer, self.inside = self.inside, True
            try:
                yield
            finally:
                self.inside = outer


class Hop:
    """Tensors on their way around a ring."""

    def __init__(self, line: Line, sent: list[Tensor], tag: int) -> None:
        self._line, self._sent = line, sent
        self._got = [torch.empty_like(tensor) for tensor in sent]
        out: dict[str, Any] = {"group": line.group, "group_dst": (line.rank + 1) % line.size}
        into: dict[str, Any] = {"group": line.group, "group_src": (line.rank - 1) % line.size}
        self._works = [dist.isend(each, tag=tag + i, **out) for i, each in enumerate(sent)]
        self._works += [dist.irecv(each, tag=tag + i, **into) for i, each in enumerate(self._got)]

    def wait(self) -> list[Tensor]:
        """What came."""
        with self._line._counted("pass_on", sum(map(size_of, self._sent))):
            for work in self._works:
                assert work is not None
                work.wait()
        return self._got


def size_of(tensor: Tensor) -> int:
    """Bytes."""
    return tensor.numel() * tensor.element_size()
