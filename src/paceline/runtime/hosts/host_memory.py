"""The memory of a host's workers, as its relay made it: segments, weights, answers."""

from __future__ import annotations

import threading

from paceline.errors import RunError
from paceline.fabric.board import Board
from paceline.fabric.segment import Segment
from paceline.runtime.hosts.local_worker import LocalWorker
from paceline.runtime.messages.hosts import SHARED, ClocksNoted, Equip
from paceline.runtime.messages.memories import COMMON, WEIGHTS
from paceline.runtime.messages.portions import PortionPlan
from paceline.store.layout import Layout
from paceline.store.replicas import answer_bytes


class HostMemory:
    """What arrives goes straight in here."""

    def __init__(self, workers: list[LocalWorker], lock: threading.Lock) -> None:
        """The relay's own list of workers, which grows, and its lock."""
        self._locals, self._lock = workers, lock
        self._shared: Segment | None = None
        self._common: Segment | None = None
        """Answers for all peers."""
        self._board: Board | None = None
        """The clocks of all ranks, where workers keep barriers of their own."""

    def note(self, told: ClocksNoted) -> None:
        """Ranks are that far, by now."""
        self._board = self._board or Board.create(told.ranks)
        for rank, clock in told.clocks.items():
            if not 0 <= rank < told.ranks:
                raise RunError(f"a clock of rank {rank}, and the run has {told.ranks} ranks.")
            self._board.note(rank, clock)

    def place(self, lane: int, what: int, offset: int, length: int | None) -> memoryview:
        """Where a piece belongs; None: all that a memory has."""
        memory = {WEIGHTS: self._shared, COMMON: self._common}.get(what) if lane == SHARED else None
        if lane < len(self._locals):
            memory = self._locals[lane].memory(what)
        length = memory.size_bytes if memory is not None and length is None else length or 0
        if memory is None or not 0 <= offset <= offset + length <= memory.size_bytes:
            raise RunError(f"{length} bytes at {offset} for a memory that was not agreed on.")
        return memoryview(memory.map)[offset : offset + length]

    def equip(self, worker: LocalWorker, order: Equip) -> None:
        """Make what a worker needs to begin."""
        assert worker.layout is not None, "a worker registers before it is equipped"
        layout = worker.layout
        worker.segment = Segment.create(layout.segment_bytes, f"gradients of worker {worker.lane}")
        self._make_weights(worker, layout, order.shared)
        if order.peer:
            size = answer_bytes(layout)
            worker.answers = Segment.create(size, f"answers for worker {worker.lane}")
            self._common = self._common or Segment.create(size, "answers for all")

    def _make_weights(self, worker: LocalWorker, layout: Layout, shared: bool) -> None:
        with self._lock:  # a holder's portion may come before the store's
            if shared:
                self._shared = self._shared or Segment.create(layout.weights_bytes, "weights")
            elif worker.weights is None:
                worker.weights = Segment.create(layout.weights_bytes, f"weights of worker {worker.lane}")

    def weights_of(self, plan: PortionPlan, lane: int) -> Segment:
        """Where weights for a lane belong that holders send."""
        if lane != SHARED and lane >= len(self._locals):
            raise RunError(f"weights for lane {lane}, which does not exist.")
        worker = self._locals[0 if lane == SHARED else lane]
        self._make_weights(worker, plan.layout, plan.shared)
        memory = self._shared if plan.shared else worker.weights
        assert memory is not None
        return memory

    def fds(self, worker: LocalWorker, shared: bool, barrier: bool) -> tuple[int, ...]:
        """What a worker is handed that may begin; weights that all read are sealed."""
        weights = worker.weights or self._shared
        if worker.segment is None or weights is None:
            return ()
        given: tuple[int, ...] = worker.segment.fd, weights.fd
        if worker.answers is not None and self._common is not None:
            given = (*given, self._common.fd, worker.answers.fd)
        if shared:
            weights.seal_for_readers()
        if not barrier:
            return given
        assert self._board is not None, "clocks are told before a worker that looks at them may begin"
        return (*given, self._board.fd)
