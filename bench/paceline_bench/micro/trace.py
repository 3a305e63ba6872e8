"""What the record of a run costs: time inside the trace's writer, of the time the run took.

Both a store's owner and a lone worker keep a trace while others (or their own next batch) wait.
The writer is the real one with a stopwatch around it, whose own cost is counted too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch

from paceline.config import RunConfig
from paceline.decoding import decode_json
from paceline.fabric.channel import Channel
from paceline.runtime.lone.recorded import RecordedSolo
from paceline.runtime.owner.loop import RealLoop
from paceline.runtime.owner.owner import Owner
from paceline.trace.events import Decided, Event
from paceline.trace.lasting import LastingTrace
from paceline_bench.harness.crew import BenchCrew
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stations import ExchangeLoad, paceline_crew
from paceline_bench.harness.stats import Spread
from paceline_bench.micro.lone_script import LoneTraining

TARGET = 0.01
NOTES = "stopwatch.json"
WIDTH, BATCH = 16, 64


class Stopwatch(msgspec.Struct):
    """What was seen."""

    inside_s: float = 0.0
    run_s: float = 0.0
    pushes: int = 0


class TimedWriter(LastingTrace):
    """A writer that counts its time, from the first push to the last."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.watch = Stopwatch()
        self._first: float | None = None
        self._inside = False

    def write(self, event: Event) -> None:
        """Write, timed."""
        with self._timed():
            super().write(event)
        if isinstance(event, Decided) and event.pushed is not None:
            now = time.perf_counter()
            self._first = now if self._first is None else self._first
            self.watch.pushes += 1
            self.watch.run_s = now - self._first

    def flush(self) -> None:
        """Flush, timed."""
        with self._timed():
            super().flush()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time in here; a flush within a write is part of it and counts once."""
        outermost, self._inside = not self._inside, True
        began = time.perf_counter()
        yield
        if outermost:
            self._inside = False
            if self._first is not None:
                self.watch.inside_s += time.perf_counter() - began


def serve_timed(config: RunConfig, workers: list[tuple[Channel, int]], stop: int) -> None:
    """The owner's process, with a stopwatch at its trace."""
    owner = Owner(config, time.monotonic)
    owner.trace.close()
    owner.trace = writer = TimedWriter(config.path / "trace.jsonl")
    try:
        RealLoop(owner, workers, stop).run()
    finally:
        owner.close()
        (config.path / NOTES).write_bytes(msgspec.json.encode(writer.watch))


class TrainingStation:
    """A worker that trains the small CNN."""

    def __init__(self, load: ExchangeLoad, config: RunConfig, rank: int, sock: socket.socket | None) -> None:
        import paceline
        from paceline.runtime import seat

        torch.set_num_threads(load.threads)
        seat.take(seat.Seat(rank, config, None if sock is None else Channel(sock)))
        self._pace = paceline.join()
        self._training = LoneTraining(WIDTH, BATCH, load.seed)
        self._training.prepare(self._pace)
        self.world = self._pace.size

    def prepare(self) -> None:
        """Nothing to prepare."""

    def exchange(self) -> None:
        """A few iterations."""
        self._training.train(10)

    def close(self) -> None:
        """Leave the run."""
        self._pace.depart()


class TracedLoneStation(TrainingStation):
    """The same with a trace of its own."""

    def __init__(self, load: ExchangeLoad, config: RunConfig) -> None:
        from paceline.runtime.lone import recorded

        self._writers: list[TimedWriter] = []
        vars(recorded)["LastingTrace"] = self._make
        super().__init__(load, config, 0, None)
        self._notes = config.path / NOTES

    def _make(self, path: Path, limit_bytes: int | None = None) -> TimedWriter:
        self._writers.append(TimedWriter(path))
        return self._writers[-1]

    def close(self) -> None:
        """Note what was seen, once the last steps are on record: a lone worker writes many at a time."""
        assert isinstance(self._pace, RecordedSolo)
        self._pace._write_down()
        self._notes.write_bytes(msgspec.json.encode(self._writers[0].watch))


def trace(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """A lone worker, a team in lockstep, a team without."""
    rows = []
    for name, workers in (("bsp", 1), ("bsp", 2), ("asp", 2)):
        watch = _run(name, workers, plan)
        rows.append(_row(name, workers, watch, plan))
        say(f"trace, {name}, {workers} workers: {rows[-1].shown}")
    return rows


def _run(name: str, workers: int, plan: BenchPlan) -> Stopwatch:
    load = ExchangeLoad(0, "sgd", workers, plan.seed)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True) as folder:
        with _crew(load, name, folder) as crew:
            crew.muster()
            crew.block(2 if plan.quick else 100)
        return decode_json((Path(folder) / NOTES).read_bytes(), kind=Stopwatch)


def _crew(load: ExchangeLoad, name: str, folder: str) -> BenchCrew:
    if load.workers > 1:
        return paceline_crew(load, name, folder, station=TrainingStation, serve=serve_timed)
    config = RunConfig(run="bench", folder=folder, protocol=name, seed=load.seed)
    return BenchCrew("lone", [partial(TracedLoneStation, load, config)])


def _row(name: str, workers: int, watch: Stopwatch, plan: BenchPlan) -> BenchRow:
    each = watch.inside_s / watch.pushes
    return BenchRow(
        case={"protocol": name, "workers": workers, "pushes": watch.pushes, "cores": os.cpu_count() or 1},
        measured={"paceline": Spread(each, each, each, each, each, watch.pushes)},
        figure="share",
        value=watch.inside_s / watch.run_s,
        target=None if plan.quick else TARGET,
        remark="inside the writer per push, of the time between pushes",
    )
