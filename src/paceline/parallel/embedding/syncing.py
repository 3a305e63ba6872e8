"""Brings the copies of a shard together: the mean of the rows that anyone has changed since the last time.

Paper: Zhang et al., 2D sparse parallelism (arXiv 2508.03854): every K steps the groups average weights, not
gradients, and the row moments with them. The paper averages whole shards; rows that nobody has touched are
equal in all copies, so they are left out, and the mean is the same. When it is time is local SGD's rule.
A group that saw more samples since the last time counts for more (with equal batches, all count the same).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.parallel.mesh import Mesh
from paceline.protocols.grid import Grid
from paceline.protocols.peer.local_sgd import LocalSGD


class Copies:
    """A worker's shards, among the copies of them."""

    def __init__(self, mesh: Grid, weights: Sequence[nn.Parameter], every: int) -> None:
        if every < 1:
            raise ConfigError(f"tables are synchronised every k steps, k >= 1, got every={every}.")
        self.size, self._index, self._weights = mesh.size("data"), mesh.index("data"), weights
        self._mesh = mesh if isinstance(mesh, Mesh) else None
        self._rule = LocalSGD(period=every)
        self._steps = self._since = 0
        self.syncs = 0
        """How often it was done."""
        self._samples = 0
        self._touched: list[list[Tensor]] = [[] for _ in weights]

    def stepped(self, samples: int, moments: Callable[[nn.Parameter], dict[str, Tensor]]) -> None:
        """After every step: note what it touched, and synchronise if it is time."""
        for weight, touched in zip(self._weights, self._touched, strict=True):
            if weight.grad is not None:
                touched.append(weight.grad.coalesce()._indices()[0])
        self._samples += samples
        self._steps, self._since = self._steps + 1, self._since + 1
        if self._since >= self._rule.period_at(self._steps):
            self.sync(moments)

    def sync(self, moments: Callable[[nn.Parameter], dict[str, Tensor]]) -> None:
        """All copies of this worker's shards come here: from now on they are equal."""
        if not self._since:
            return
        mine = [_once(touched) for touched in self._touched]
        shares, rows = self._union(mine) if self.size > 1 else ([1.0], mine)
        for weight, union in zip(self._weights, rows, strict=True):
            if len(union):
                self._average(weight, moments(weight), union, shares)
        self._touched = [[] for _ in self._weights]
        self._samples = self._since = 0
        self.syncs += 1

    def _union(self, mine: list[Tensor]) -> tuple[list[float], list[Tensor]]:
        """Every copy's share of the mean, and the rows that any of them has touched."""
        head = torch.tensor([self._samples, *map(len, mine)])
        heads = self._gathered(head).tolist()
        longest = max(sum(row[1:]) for row in heads)
        padded = torch.zeros(longest, dtype=torch.int64)
        if mine:
            torch.cat(mine, out=padded[: sum(map(len, mine))])
        everybody = self._gathered(padded)
        cut = [torch.split(line[: sum(row[1:])], row[1:]) for line, row in zip(everybody, heads, strict=True)]
        total = sum(row[0] for row in heads)
        shares = [row[0] / total if total else 1 / self.size for row in heads]
        return shares, [_once([part[index] for part in cut]) for index in range(len(mine))]

    def _gathered(self, given: Tensor) -> Tensor:
        """Everybody's, a row for each."""
        assert self._mesh is not None
        got = given.new_empty(self.size, len(given))
        if not len(given):
            return got
        with self._mesh.exchange("data", (self.size - 1) * given.numel() * given.element_size()):
            dist.all_gather(list(got), given, group=self._mesh.group("data"))
        return got

    def _average(self, weight: Tensor, moments: dict[str, Tensor], rows: Tensor, shares: list[float]) -> None:
        with torch.no_grad():
            v = moments.get("sum")
            if self.size > 1:
                parts = [weight.detach().index_select(0, rows)]
                parts += [] if v is None else [v.index_select(0, rows).unsqueeze(1)]
                mean = self._reduced(torch.cat(parts, 1), shares)
                weight.index_copy_(0, rows, mean[:, : weight.shape[1]].contiguous())
                if v is not None:
                    v.index_copy_(0, rows, mean[:, -1].contiguous())
            if v is not None and "synced" in moments:
                moments["synced"].index_copy_(0, rows, v.index_select(0, rows))

    def _reduced(self, mine: Tensor, shares: list[float]) -> Tensor:
        """The weighted mean; the plain one, which rounds less, if all count the same."""
        same = len(set(shares)) == 1
        if not same:
            mine *= shares[self._index]
        assert self._mesh is not None
        with self._mesh.exchange("data", 2 * (self.size - 1) * mine.nbytes // self.size):
            dist.all_reduce(mine, group=self._mesh.group("data"))
        return mine.div_(self.size) if same else mine


def _once(rows: list[Tensor]) -> Tensor:
    """All of them, each once and in order."""
    if len(rows) == 1:
        return rows[0]
    return torch.unique(torch.cat(rows)) if rows else torch.empty(0, dtype=torch.int64)
