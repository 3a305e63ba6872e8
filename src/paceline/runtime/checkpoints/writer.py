"""Checkpoints of a run that goes on.

Training waits while its state is copied in memory, between two updates; a thread writes the copy. The
checkpoint before stays until the new one is on the disk. One that cannot be written is a warning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread

from msgspec import structs

from paceline.amounts import Every, parse_every
from paceline.config import RunConfig
from paceline.store.disk.checkpoint import Snapshot, write_checkpoint
from paceline.trace import TraceWriter, events

Taken = Callable[[], Snapshot]
"""A copy that was taken; the thread that writes it waits for what of it is still on its way."""


class CheckpointWriter:
    """Knows when the next one is due, and writes one at a time."""

    def __init__(self, config: RunConfig, trace: TraceWriter, now: Callable[[], float]) -> None:
        every = config.checkpoint_every
        self._every = Every() if every is None else parse_every(every)
        self._folder, self._keep = config.path / "checkpoint", config.keep
        self._trace, self._now = trace, now
        self._since, self._since_s = 0, 0.0
        self._kept: int | None = None
        self._failed = False
        self._taken: tuple[Taken, events.Kept] | None = None
        self._thread: Thread | None = None
        self._outcome: events.Kept | str = ""
        self._remarks: list[str] = []
        """What is to be told of the writing."""

    def begin(self, updates: int) -> None:
        """The run begins, with so many updates behind it."""
        self._since, self._since_s = updates, self._now()

    def due(self, updates: int) -> bool:
        """Whether it is time for one, and the last one is written."""
        every = self._every
        if every.updates is not None:
            late = updates // every.updates > self._since // every.updates
        else:
            late = every.seconds is not None and self._now() - self._since_s >= every.seconds
        return late and updates != self._since and not self.busy

    def keep(self, updates: int, samples: int, take: Callable[[], Taken]) -> None:
        """Take a copy now, to be written as soon as somebody wants to be told."""
        began = time.perf_counter()
        self._since, self._since_s = updates, self._now()
        try:
            taken = take()
        except Exception as error:  # no memory for a copy, say: no reason to stop training either
            self.fail(updates, str(error))
            return
        kept = events.Kept(self._since_s, updates, samples, time.perf_counter() - began)
        self._taken = taken, kept

    def fail(self, updates: int, why: str) -> None:
        """One could not be taken."""
        self._since, self._since_s = updates, self._now()
        self._not_written(updates, why)
        self._tell()

    @property
    def busy(self) -> bool:
        """Whether one is taken and not written yet."""
        return self._taken is not None or self._thread is not None

    def tell(self, wait: bool = False) -> None:
        """Put on record what became of the last one, once that is known."""
        if self._taken is not None:
            self._trace.flush()  # what is in a checkpoint is on record, whatever happens
            self._thread = Thread(target=self._write, args=self._taken, name="checkpoint")
            self._taken = None
            self._thread.start()
        thread = self._thread
        if thread is None or (thread.is_alive() and not wait):
            return
        thread.join()
        self._thread = None
        self._tell()

    def _tell(self) -> None:
        while self._remarks:
            self._trace.write(events.Note(self._now(), "warning", self._remarks.pop(0)))
        if isinstance(self._outcome, events.Kept):
            self._kept, self._failed = self._outcome.version, False
            self._trace.write(self._outcome)
        elif not self._failed:  # once, not every time again
            self._failed = True
            self._trace.write(events.Note(self._now(), "warning", self._outcome + self._remains))

    @property
    def _remains(self) -> str:
        if self._kept is None:
            return ". There is no earlier one; training continues"
        return f". The one after {self._kept} updates remains; training continues"

    def _write(self, taken: Taken, kept: events.Kept) -> None:
        began = time.perf_counter()
        try:
            write_checkpoint(self._folder, taken(), self._keep, self._remarks.append)
            self._outcome = structs.replace(kept, write_s=time.perf_counter() - began)
        except Exception as error:  # whatever it is, it is no reason to stop training
            self._not_written(kept.version, str(error))

    def _not_written(self, updates: int, why: str) -> None:
        self._outcome = f"the checkpoint after {updates} updates could not be written: {why}"
