"""The books of a run on a mesh: what its workers tell, as the events that any run writes."""

from __future__ import annotations

import time
from math import inf

from paceline.config import RunConfig
from paceline.parallel import messages as m
from paceline.parallel.conductor.record import Record
from paceline.protocols.grid import Grid
from paceline.runtime.messages.workers import Hello
from paceline.store.ledger import run_not_begun, run_started
from paceline.store.work.due import LoaderPasses, shortfall
from paceline.trace import events
from paceline.trace.lasting import LastingTrace

BEHIND_S = 0.3
"""Workers tell ten times a second what they did: events are put into their order before they are written."""


class MeshBooks:
    """Keeps the trace, in the order of time."""

    def __init__(self, config: RunConfig, grid: Grid) -> None:
        self.config, self._grid = config, grid
        self.trace = LastingTrace(config.path / "trace.jsonl", config.trace_limit_bytes)
        self._zero_s = time.monotonic()
        self._begun = False
        self._record = Record(self.trace.write, config.workers)
        self._here: set[int] = set()
        self._samples = 0
        self.samples_due: int | None = None
        """Samples of the epochs that the script began, once a worker has told."""
        self.passes: dict[int, LoaderPasses] = {}
        """Over the loader, of each worker that has told."""
        self.stopped = False
        self.resumable = True

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._zero_s

    @property
    def version(self) -> int:
        """Updates that all workers have made."""
        return self._record.version

    def joined(self, rank: int, hello: Hello) -> None:
        """A worker takes part. The first one says what is trained."""
        if not self._begun:
            self._begun = True
            name = self.config.protocol or hello.protocol or "mesh"
            self.trace.write(run_started(self.config, name, hello.settings, simulated=False))
        self._here.add(rank)
        self.trace.write(events.WorkerJoined(self.now(), rank, hello.pid))

    def take(self, rank: int, message: m.FromWorker) -> None:
        """What a worker tells."""
        now = self.now()
        match message:
            case m.Did():
                self._did(rank, message)
            case m.LeadReady():
                self.trace.write(
                    events.ModelReady(
                        now,
                        message.parameters,
                        message.weight_bytes,
                        message.weight_bytes,
                        message.samples_per_epoch,
                        message.batches_per_epoch,
                    )
                )
            case m.Plan():
                self.trace.write(events.Planned(now, message.epochs))
            case m.Noted():
                self.trace.write(events.Note(now, message.level, message.text))
            case m.Measured():
                t = now - message.seconds
                self.trace.write(
                    events.Evaluated(
                        t, rank, message.version, message.samples, message.values, message.seconds
                    )
                )

    def end_work(self, rank: int, why: str) -> None:
        """A script has ended training for all."""
        self.trace.write(events.WorkEnded(self.now(), rank, why))

    def _did(self, rank: int, did: m.Did) -> None:
        for each in did.iterations:
            self._samples += each.samples
            self._record.add(rank, each.end_s - self._zero_s, each)
        for axis, sent in did.sent.items():
            self.trace.write(events.Exchanged(self.now(), "send", (rank,), sent, axis=axis))
        if did.lookups is not None:
            self.trace.write(events.LookedUp(self.now(), rank, did.lookups))
        if did.values:
            self.trace.write(events.Reported(self.now(), rank, self._record.clocks[rank], did.values))

    def flush(self, now: float | None) -> None:
        """Write what is old enough; None: everything."""
        self._record.flush(inf if now is None else now - self._zero_s - BEHIND_S)
        self.trace.flush()

    def left(self, rank: int, reason: str, detail: str = "") -> None:
        """A worker takes part no longer."""
        self.flush(None)
        self.stopped |= reason == "stopped"
        if rank in self._here:
            self._here.discard(rank)
            self.trace.write(events.WorkerLeft(self.now(), rank, reason, detail))  # type: ignore[arg-type]

    def warn(self, text: str) -> None:
        """Something that people should know."""
        self.trace.write(events.Note(self.now(), "warning", text))

    def mention_undone(self) -> None:
        """Say so if the script's passes should have trained on more data."""
        if self.samples_due is not None and self._samples < self.samples_due:
            self.warn(shortfall(self._samples, self.samples_due, self.passes))

    def end(self, status: str, detail: str, mistake: bool = False) -> None:
        """The last word."""
        self.flush(None)
        if not self._begun:
            self.trace.write(run_not_begun(self.config, simulated=False))
        ended = events.RunEnded(self.now(), status, detail, mistake, self.samples_due)  # type: ignore[arg-type]
        self.trace.write(ended)

    def close(self) -> None:
        """No more."""
        self.trace.close()
