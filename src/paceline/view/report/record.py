"""One run as the report needs it: its trace read once, in bounded memory."""

from __future__ import annotations

from collections import deque
from math import isfinite
from pathlib import Path

from paceline.errors import TraceError
from paceline.trace import Result, Tally, read_trace
from paceline.trace.events import (
    AnyEvent,
    Decided,
    Gap,
    Heard,
    LeadPassed,
    ModelReady,
    Note,
    Progress,
    Reported,
    RunStarted,
    Silent,
    WorkEnded,
    WorkerJoined,
    WorkerLeft,
)
from paceline.trace.life import is_orphan
from paceline.view.report.series import Point, TimeBins, thin
from paceline.view.report.spans import Spans, StateSpan

SPANS_KEPT = 240
"""Of each worker, from the start: more than a timeline can show."""
NOTES_KEPT = 100
POINTS_KEPT = 240


class RunRecord:
    """What a trace told."""

    def __init__(self, start: RunStarted) -> None:
        self.start = start
        self.tally = Tally()
        self.spans: dict[int, list[StateSpan]] = {}
        self.cut_s = float("inf")
        """Up to here no span is missing."""
        self.training_loss = TimeBins()
        self.throughput = TimeBins()
        self.lost: list[WorkerLeft] = []
        self.notes: deque[Note] = deque(maxlen=NOTES_KEPT)
        self.notes_seen = 0
        self._cutter = Spans()
        self._training_diverged = False
        self._last_push_s: dict[int, float] = {}
        self._counted, self._counted_s = 0, 0.0
        """Samples that `throughput` has so far, and until when."""
        self._left_losses = (0.0, 0)

    @property
    def result(self) -> Result:
        """What the run came to."""
        return self.tally.result()

    @property
    def model(self) -> ModelReady | None:
        """The model, once the store held it."""
        return self.tally.model

    def add(self, event: AnyEvent) -> None:
        """Take the next event."""
        self.tally.add(event)
        for span in self._cutter.add(event):
            self._keep(span)
        match event:
            case Decided():
                self._count(event)
            case Reported():
                self._reported(event)
            case WorkerJoined():
                self._last_push_s.pop(event.worker, None)
            case WorkerLeft(reason="died" | "failed"):
                self.lost.append(event)
            case Note():
                self.notes.append(event)
                self.notes_seen += 1
            case Silent():
                self.notes.append(Note(event.t, "warning", event.text))
                self.notes_seen += 1
            case WorkEnded() | Heard() | LeadPassed():
                self.notes.append(Note(event.t, "info", event.text))
                self.notes_seen += 1
            case Progress():
                self._progress(event)
            case Gap():
                self._last_push_s.clear()
                self.notes.append(Note(event.t, "info" if event.wanted else "warning", event.text))
                self.notes_seen += 1

    def evaluated(self, name: str) -> list[Point]:
        """What the lead measured under this name, over time."""
        points = [(e.t, e.values[name]) for e in self.tally.evaluations if name in e.values]
        return thin(sorted(point for point in points if isfinite(point[1])), POINTS_KEPT)

    @property
    def diverged(self) -> bool:
        """Whether a loss was no number: there is nothing to draw for it."""
        evaluated = (e.values.get("loss", 0.0) for e in self.tally.evaluations)
        return self._training_diverged or not all(map(isfinite, evaluated))

    def _reported(self, event: Reported) -> None:
        loss = event.values.get("loss")
        if loss is not None and isfinite(loss):
            self.training_loss.add(event.t, loss)
        elif loss is not None:
            self._training_diverged = True

    def _keep(self, span: StateSpan) -> None:
        kept = self.spans.setdefault(span.worker, [])
        if len(kept) < SPANS_KEPT:
            kept.append(span)
        else:
            self.cut_s = min(self.cut_s, kept[-1].end)

    def _count(self, event: Decided) -> None:
        # Samples count over the iteration they took, so that lockstep rounds do not show as bursts.
        if event.pushed is not None and event.samples:
            self._counted, self._counted_s = self._counted + event.samples, event.t
            began = self._last_push_s.get(event.pushed, event.t - event.compute_s)
            self.throughput.spread(max(0.0, began), event.t, event.samples)
            self._last_push_s[event.pushed] = event.t

    def _progress(self, event: Progress) -> None:
        since, before = self._counted_s, self._counted
        self._counted, self._counted_s = event.samples, event.t
        if event.samples > before:
            self.throughput.spread(since, event.t, event.samples - before)
        (total, count), self._left_losses = self._left_losses, (event.loss_sum, event.loss_count)
        self._training_diverged |= event.diverged
        if event.loss_count > count:
            self.training_loss.spread(since, event.t, event.loss_sum - total, event.loss_count - count)


def read_record(path: Path) -> RunRecord:
    """Read the trace of a run folder."""
    events = read_trace(path)
    first = next(events)
    assert isinstance(first, RunStarted), "a trace begins with run_started"
    record = RunRecord(first)
    record.add(first)
    for event in events:
        try:
            record.add(event)
        except KeyError as error:
            raise TraceError(
                f"the trace of {path} releases rank {error} at {event.t:g} s, which did not wait."
            ) from None
    record.tally.interrupted = record.tally.end is None and is_orphan(path)
    return record
