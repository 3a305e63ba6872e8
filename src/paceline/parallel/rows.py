"""Rows that an engine has for each worker (Spark's `train_on`), as the batches of a mesh.

A copy's data are the rows of all of its workers. Each reads its own rows of a batch, once, and gives them to
the others of its copy, who compute with the same batch. All copies have equally many batches per epoch: as
many as the copy with the most rows needs; those with fewer rows have smaller batches, and updates weigh them
by their samples.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from torch.utils.data import DataLoader

from paceline.decoding import decode_json, decode_message
from paceline.errors import ConfigError
from paceline.parallel.loading import AnyRounds, Indices, MeshLoader
from paceline.parallel.mesh import Mesh, gather_bytes
from paceline.parallel.pace import MeshPace
from paceline.runtime.worker.data.partition import Partition

AXIS = "rows"
"""Under this name rows that are passed on stand in the trace: they are no exchange of the model's axes."""


class DealtRows(MeshLoader):
    """A loader of rows that lie with the workers."""

    def __init__(
        self,
        loader: DataLoader[Any],
        copy: int,
        copies: int,
        seed: int,
        pace: MeshPace,
        mesh: Mesh,
        feeding: Mapping[str, int],
    ) -> None:
        """`feeding`: the axes along which copies lie."""
        self._pace, self._mesh = pace, mesh
        within = [axis for axis, size in mesh.axes.items() if axis not in feeding and size > 1]
        if len(within) > 1:
            raise ConfigError(f"rows of an engine go along one axis within a copy, the mesh has {within}.")
        self._within = within[0] if within else None
        super().__init__(loader, copy, copies, seed)

    def _open(self, loader: Any, seed: int) -> None:
        self._seed, self._partition = seed, loader.dataset
        assert isinstance(self._partition, Partition)
        if loader.batch_size is None:
            raise ConfigError("a mesh needs a loader that makes batches: give it a batch_size.")
        everybody = gather_bytes(msgspec.json.encode((self._copy, len(self._partition))), self._mesh.count)
        told = [decode_json(each, kind=tuple[int, int]) for each in everybody]
        self._rows = [sum(n for copy, n in told if copy == c) for c in range(self._copies)]
        line = self._mesh.ranks(self._within) if self._within else (self._mesh.rank,)
        self._members = [told[rank][1] for rank in line]
        self._turns, self._whole = -(-max(self._rows) // loader.batch_size), sum(self._rows)
        if min(self._rows) < self._turns:
            poorest = self._rows.index(min(self._rows))
            raise ConfigError(
                f"copy {poorest} of the model has {self._rows[poorest]} rows, and an epoch {self._turns} "
                "batches, of which each copy needs a row at least. Spread them: frame.repartition(N)."
            )

    @property
    def per_epoch(self) -> int:
        """Rows, of all copies."""
        return sum(self._rows)

    def _rounds(self, epoch: int) -> list[list[Indices]]:
        owned = [(member, row) for member, count in enumerate(self._members) for row in range(count)]
        if self._partition.shuffles:
            random.Random(f"{self._seed}/{epoch}/{self._copy}").shuffle(owned)
        turns = []
        for turn in range(self._turns):
            spans = [(count * turn // self._turns, count * (turn + 1) // self._turns) for count in self._rows]
            turns.append(
                [
                    owned[start:end] if copy == self._copy else list(range(start, end))
                    for copy, (start, end) in enumerate(spans)
                ]
            )
        return turns

    def _loaded(self, rounds: AnyRounds, coming: range) -> Iterator[Any]:
        for at in coming:
            yield self._loader.collate_fn(self._shared(rounds[at][self._copy]))

    def _shared(self, order: Indices) -> list[Any]:
        """The rows of a batch in their order: one's own, and those of the others of this copy."""
        mine = 0 if self._within is None else self._mesh.index(self._within)
        own = list(self._partition.rows(row for member, row in order if member == mine))
        if self._within is None:
            return own
        data = msgspec.msgpack.encode(own)
        self._pace.sent(AXIS, len(data) * (len(self._members) - 1))
        told = gather_bytes(data, len(self._members), self._mesh.group(self._within))
        found = [iter(decode_message(each)) for each in told]
        return [next(found[member]) for member, _ in order]
