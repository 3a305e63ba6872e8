"""Workers of a line as threads of one process: the same layers, with exchanges through memory."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from paceline.parallel.layers.block_line import BlockLine
from paceline.parallel.layers.costs import LayerCosts
from paceline.parallel.layers.row_split import RowSplit
from paceline.parallel.layers.splitting import Splitter


class ThreadLine(BlockLine):
    """A place on a line whose others are threads."""

    def __init__(self, size: int, index: int, desk: dict[Any, Any], barrier: threading.Barrier) -> None:
        self.size, self.index, self._desk, self._barrier = size, index, desk, barrier
        self.sent_bytes = self.synchronisations = 0

    def swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        self._desk[self.index] = outgoing
        self._barrier.wait(60)
        for other in range(self.size):
            if other != self.index:
                self.sent_bytes += outgoing[other].numel() * outgoing[other].element_size()
                incoming[other].copy_(self._desk[other][self.index])
        self._barrier.wait(60)

    def same(self, tensor: Tensor) -> None:
        self._barrier.wait(60)


class Split:
    """One worker's share of a model."""

    def __init__(self, model: nn.Module, line: ThreadLine, settings: RowSplit) -> None:
        self.line, self.costs = line, LayerCosts(line)
        self.model = Splitter(model, line, settings, self.costs).split()
        self.costs.watch(self.model)


def split_over(
    workers: int, model: nn.Module, work: Callable[[Split], Any], settings: RowSplit | None = None
) -> list[Any]:
    """Every worker has its own copy of the model, split; what each made of it."""
    barrier, desk = threading.Barrier(workers), {}
    made: list[Any] = [None] * workers
    failed: list[BaseException] = []

    def run(index: int) -> None:
        try:
            line = ThreadLine(workers, index, desk, barrier)
            share = Split(copy.deepcopy(model), line, settings or RowSplit(smallest=1))
            made[index] = work(share)
            share.costs.stepped()  # what counts flops slows every module of the process until then
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in failed if not isinstance(error, threading.BrokenBarrierError)]
    if failed:
        raise (real or failed)[0]
    return made


def whole(pieces: list[dict[str, Any]], parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all workers put together."""
    found: dict[str, Tensor] = {}
    for cut, tensors in zip(pieces, parts, strict=True):
        for name, tensor in tensors.items():
            if name in cut:
                cut[name].into(found.setdefault(name, tensor.new_empty(cut[name].shape)), tensor)
            else:
                found[name] = tensor
    return found
