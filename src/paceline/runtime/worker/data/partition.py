"""A worker's own rows, as a dataset: what its engine had for it alone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from paceline.runtime.worker.data.rows import read_rows, scan


class Partition(IterableDataset[Any]):
    """The rows, once per pass; with `shuffle` in another order each time, drawn from the seed.

    Several loading processes share the rows among themselves. It is this worker's alone: prepared, its
    loader gives all of it, where that of any other iterable dataset is divided among the workers.
    """

    def __init__(self, fd: int, shuffle: bool = False, seed: int = 0) -> None:
        self._path, self._shuffle = f"/proc/self/fd/{fd}", shuffle
        self._random = random.Random(seed)
        self._starts = list(scan(self._path))

    @property
    def shuffles(self) -> bool:
        """Whether every pass has an order of its own."""
        return self._shuffle

    def rows(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Some of them, by where they stand."""
        return read_rows(self._path, [self._starts[number] for number in numbers])

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Any]:
        order, drawn, helper = list(self._starts), self._random, get_worker_info()
        if (
            helper is not None
        ):  # a copy of us: what it draws must be what its siblings draw, and new each time
            drawn = random.Random(helper.seed - helper.id)
        if self._shuffle:
            drawn.shuffle(order)
        return read_rows(self._path, order if helper is None else order[helper.id :: helper.num_workers])
