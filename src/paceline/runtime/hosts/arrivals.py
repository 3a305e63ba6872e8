"""What becomes of vectors that arrive at a host: some are other workers' as well, some are to be added up."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from paceline.errors import RunError
from paceline.fabric.segment import Segment
from paceline.fabric.session import Session
from paceline.runtime.hosts.local_worker import LocalWorker
from paceline.runtime.messages.hosts import HOST, Copy, SumVectors, VectorStaged
from paceline.runtime.messages.memories import STAGED
from paceline.runtime.messages.workers import Meet
from paceline.store.compression.unpack import Bytes, Unpacker

Place = Callable[[int, int, int, int | None], memoryview]
"""A piece of a lane's memory: which one, from where, how long (None: to its end)."""


class Arrivals:
    """One host's. Called by the session's reading thread."""

    def __init__(self, workers: list[LocalWorker], place: Place) -> None:
        self._workers, self._place = workers, place
        self._unpacking: Unpacker | None = None

    def brought(self, session: Session, worker: LocalWorker, message: Meet) -> None:
        """A worker has brought a compressed vector: send it. Called by the relay's own thread."""
        packed = worker.pack(message)
        session.send(worker.lane, msgspec.msgpack.encode(VectorStaged(len(packed))), HOST)
        session.send_memory(worker.lane, STAGED, memoryview(packed), 0, len(packed))

    def copy(self, worker: LocalWorker, order: Copy) -> None:
        """A vector that has arrived for one worker is another's as well."""
        if [b - a for _, a, b in order.sources] != [b - a for _, a, b in order.targets]:
            raise RunError("a copy of one size to a place of another.")
        for source, target in zip(order.sources, order.targets, strict=True):
            taken = self._place(order.lane, source.memory, source.start, source.stop - source.start)
            given = self._place(worker.lane, target.memory, target.start, target.stop - target.start)
            given[:] = taken

    def stage(self, worker: LocalWorker, order: VectorStaged) -> None:
        """Compressed vectors are about to arrive: make room, but no more than a vector needs."""
        if not 0 < order.size_bytes <= self._for(worker).longest_bytes:
            raise RunError(f"compressed vectors of {order.size_bytes} bytes.")
        worker.staged = Segment.create(order.size_bytes, "compressed vectors")
        worker.staged.close_fd()

    def add_up(self, worker: LocalWorker, order: SumVectors) -> None:
        """All summands are here: take them apart, and add them up as the meeting place has."""
        staged, worker.staged = worker.staged, None
        sent = memoryview(b"" if staged is None else staged.map)
        terms: list[tuple[Bytes, float]] = []
        for share, lane, size in order.terms:
            packed = sent[:size] if lane is None else self._brought(order.operation, lane)
            sent = sent[size:] if lane is None else sent
            if len(packed) != size:
                raise RunError(f"a summand of {size} bytes has {len(packed)}.")
            terms.append((packed, share))
        unpacking = self._for(worker)
        into = unpacking.parts(self._place(order.lane, order.memory, 0, None))
        unpacking.add_up(terms, into, order.part)

    def _brought(self, operation: int, lane: int) -> bytearray:
        """What a worker of this host had sent itself."""
        packed = self._workers[lane].packed.get(operation) if lane in range(len(self._workers)) else None
        if packed is None:
            raise RunError(f"lane {lane} has brought nothing to operation {operation}.")
        return packed

    def _for(self, worker: LocalWorker) -> Unpacker:
        if self._unpacking is None:
            assert worker.layout is not None, "a worker registers before it is sent anything"
            self._unpacking = Unpacker(worker.layout, worker.compress)
        return self._unpacking
