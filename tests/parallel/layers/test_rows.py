"""Rows of an engine's partitions as batches of a mesh: each is read once, and shared within a copy."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from paceline.errors import ConfigError
from paceline.parallel import rows as under_test
from paceline.parallel.rows import DealtRows
from paceline.protocols.grid import Grid
from paceline.runtime.worker.data.partition import Partition
from paceline.runtime.worker.data.rows import spooled

MESH = {"data": 2, "model": 2}


class Place(Grid):
    """A place on a mesh whose others are threads; a group is its ranks."""

    def group(self, axis: str) -> tuple[int, ...]:
        return self.ranks(axis)


def read(monkeypatch: pytest.MonkeyPatch, parts: list[range], epochs: int = 2) -> list[Any]:
    """What each of four workers gets, batch by batch, and the rows that it read by itself."""
    barrier, desk, here = threading.Barrier(4), {}, threading.local()
    made: list[Any] = [None] * 4

    def gather_bytes(data: bytes, size: int, group: Any = None) -> list[bytes]:
        desk[here.rank] = data
        barrier.wait(30)
        found = [desk[rank] for rank in (range(size) if group is None else group)]
        barrier.wait(30)
        return found

    class Watched(Partition):
        def rows(self, numbers: Any) -> Any:
            for row in super().rows(numbers):
                self.read.append(row["id"])
                yield row

    def work(rank: int) -> None:
        here.rank, place = rank, Place(MESH, rank)
        with spooled([{"id": number} for number in parts[rank]]) as file:
            assert file is not None
            partition = Watched(file, True, rank)
            partition.read = []  # type: ignore[attr-defined]
            loader, pace = DataLoader(partition, batch_size=8), SimpleNamespace(sent=lambda axis, size: None)
            try:
                dealt = DealtRows(loader, place.index("data"), 2, 0, pace, place, {"data": 2})  # type: ignore[arg-type]
                got = [[batch["id"].tolist() for batch in dealt] for _ in range(epochs)]
                made[rank] = got, partition.read  # type: ignore[attr-defined]
            except ConfigError as error:
                made[rank] = error

    monkeypatch.setattr(under_test, "gather_bytes", gather_bytes)
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def test_every_row_is_read_once_per_epoch_by_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7, with unequal partitions: 45 rows for the first copy, 39 for the second."""
    parts = [range(20), range(20, 45), range(45, 70), range(70, 84)]
    made = read(monkeypatch, parts)
    assert made[0][0] == made[1][0]
    assert made[2][0] == made[3][0]
    for rank, part in enumerate(parts):
        assert sorted(made[rank][1]) == sorted([*part, *part])
    for epoch in range(2):
        assert sorted(row for rank in (0, 2) for batch in made[rank][0][epoch] for row in batch) == list(
            range(84)
        )
        assert [len(made[rank][0][epoch]) for rank in range(4)] == [6] * 4
    assert made[0][0][0] != made[0][0][1]


def test_a_copy_with_too_few_rows_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made = read(monkeypatch, [range(40), range(40, 60), range(60, 62), range(62, 64)])
    assert all(isinstance(each, ConfigError) for each in made)
    assert "copy 1 of the model has 4 rows, and an epoch 8 batches" in str(made[0])
