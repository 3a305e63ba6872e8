"""The trace of a real run: it outlives a full disk, and is bounded unless somebody asks for all of it.

Events are added up here as well, which costs about a microsecond each; without a limit only after trouble.
What cannot be written, or is beyond the limit, is left out: the many lines of single iterations, never those
that are few (who came and left, evaluations, checkpoints, notes), which wait until there is room. The end
then has `Totals` over everything: the result stays right.
"""

from __future__ import annotations

import contextlib
import sys
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from paceline.errors import TraceError
from paceline.trace.events import (
    Asked,
    Came,
    Decided,
    Event,
    Exchanged,
    Gap,
    LookedUp,
    Note,
    Passed,
    Progress,
    Reported,
    Rested,
    RunEnded,
    RunStarted,
    Totals,
)
from paceline.trace.files import TraceWriter, decode, read_trace
from paceline.trace.tally import Tally

MANY = (Decided, Asked, Passed, Exchanged, LookedUp, Came, Rested, Reported)
"""One or more of these for every iteration."""
_PREFIXES = tuple(f'{{"event":"{kind.__struct_config__.tag}"'.encode() for kind in MANY)
_ABOUT_GAPS = tuple(f'{{"event":"{kind.__struct_config__.tag}"'.encode() for kind in (Gap, Progress))
AGAIN_S = 1.0
"""How long to wait before writing is tried again."""


class LeftLosses(NamedTuple):
    """Losses that are not in the trace one by one."""

    total: float = 0.0
    number: int = 0
    diverged: bool = False

    def with_one(self, loss: float) -> LeftLosses:
        """And a further one."""
        if not isfinite(loss):
            return self._replace(diverged=True)
        return self._replace(total=self.total + loss, number=self.number + 1)


class Books(Tally):
    """The tally of all events, whether they are written or not."""

    def __init__(self) -> None:
        super().__init__()
        self._left_losses = LeftLosses()

    def leave_out(self, event: Event) -> None:
        """It was added up, and is not written."""
        if isinstance(event, Reported) and "loss" in event.values:
            self._left_losses = self._left_losses.with_one(event.values["loss"])

    def progress(self, now: float) -> Progress:
        """Where the run stands."""
        clocks = list(self.clock.values()) or [0]
        return Progress(
            now,
            self.pushes,
            self.samples,
            self.version,
            min(clocks),
            max(clocks),
            len(self.waiting_since),
            self._left_losses.total,
            self._left_losses.number,
            self._left_losses.diverged,
        )

    def totals(self, now: float) -> Totals:
        """What everything adds up to."""
        ranks = range(self.start.workers if self.start else 0)
        waiting = {rank: now - since for rank, since in self.waiting_since.items()}
        looks, asked = self._looks or (None, None)
        return Totals(
            t=now,
            pushes=self.pushes,
            samples=self.samples,
            max_gap=self.max_gap,
            staleness=dict(self.staleness),
            compute_s=tuple(self.compute_s[rank] for rank in ranks),
            wait_s=tuple(self.wait_s.get(rank, 0.0) + waiting.get(rank, 0.0) for rank in ranks),
            pushes_each=tuple(self._pushes[rank] for rank in ranks),
            looks=looks,
            asked=asked,
            version=self.version,
            sent_each=tuple(self.exchanged_bytes[rank] for rank in ranks),
            got_bytes=self._got_bytes,
            lssr=self._lssr,
            losses=tuple(self._losses),
            travel_s=tuple(self.travel_s[rank] for rank in ranks),
            withheld=self._withheld,
            forced=self._forced,
            ahead_bytes=self._ahead_bytes,
            consensus_distance=self._distance,
            landscape=self._landscape,
            sent_along=dict(self.bytes_by_axis),
            lookups=self._lookups,
        )


class LastingTrace(TraceWriter):
    """Appends a run's events to its file, as far as there is room."""

    def __init__(self, path: Path, limit_bytes: int | None = None) -> None:
        """`limit_bytes`: how long it may get before single iterations are left out."""
        super().__init__(path)
        self._path = path
        self._early: list[Event] | None = [] if path.stat().st_size == 0 else None
        """What came before the run began, such as a plan of epochs; a trace begins with run_started."""
        self._books = None if limit_bytes is None else Books()
        self._ended = False
        self._limit_bytes = limit_bytes
        self._broken = ""
        """Why nothing can be written now."""
        self._full = False
        self._left_out = self._ever_left_out = 0
        self._since = self._again_at = self._now = 0.0

    def write(self, event: Event) -> None:
        """Add an event, or only count it. Those before run_started follow it."""
        if self._early is not None:
            self._early.append(event)
            if isinstance(event, RunStarted):
                early, self._early = [event, *self._early[:-1]], None
                for each in early:
                    self.write(each)
            return
        if self._books is not None:
            self._books.add(event)  # type: ignore[arg-type]
        self._now = max(self._now, event.t)
        if isinstance(event, RunEnded):
            self._end(event)
        elif not isinstance(event, MANY):
            super().write(event)
        elif self._broken or self._full:
            self._leave_out(event)
            if self._now >= self._again_at:
                self._look_again()
        else:
            super().write(event)
            if self._limit_bytes is not None and self.size_bytes >= self._limit_bytes:
                self._fill_up()

    def flush(self) -> None:
        """Let readers see everything so far; trouble with the file is no trouble for the run."""
        if self._broken and self._now < self._again_at and not self._ended:
            return
        if self._broken:
            at = 0 if self._written else self._pending.find(b"\n") + 1  # a trace begins with run_started
            sums = b"" if self._books is None else self._encoded(self._books.progress(self._now))
            self._pending[at:at] = sums + self._encoded(self._gap(self._broken))
        try:
            super().flush()
        except OSError as error:
            self._trouble(error)
        else:
            if self._broken:
                self._broken, self._left_out = "", 0

    def close(self) -> None:
        """Flush and close; what is still not written is lost."""
        self.flush()
        with contextlib.suppress(OSError):
            self._file.close()

    # -- what is left out ---------------------------------------------------------------------

    def _trouble(self, error: OSError) -> None:
        """Keep the few lines, leave the many out, and try again in a while."""
        self._books = self._books or self._added_up()
        lines = bytes(self._pending).splitlines(keepends=True)
        few = [line for line in lines if not line.startswith((*_PREFIXES, *_ABOUT_GAPS))]
        if not self._broken:
            self._since = self._now
            with contextlib.suppress(OSError):  # the log may be on the same disk
                print(f"warning: the trace cannot be written: {error}", file=sys.stderr)
        for line in lines:
            if line.startswith(_PREFIXES):
                self._leave_out(decode(line))
        self._ever_left_out += 1
        self._broken, self._again_at = error.strerror or str(error), self._now + AGAIN_S
        self._pending[:] = b"".join(few)

    def _leave_out(self, event: Event) -> None:
        self._left_out += 1
        if self._books is not None:
            self._books.leave_out(event)

    def _added_up(self) -> Books:
        """All events so far: those in the file, and those that are not."""
        books = Books()
        with contextlib.suppress(TraceError, OSError):
            for event in read_trace(self._path):
                books.add(event)
        for line in bytes(self._pending).splitlines():
            books.add(decode(line))
        return books

    def _gap(self, why: str) -> Gap:
        return Gap(self._now, self._since, self._left_out, why, wanted=not self._broken)

    def _fill_up(self) -> None:
        """It is as long as it may get."""
        self._full, self._since, self._ever_left_out = True, self._now, 1
        text = (
            f"the trace has {self.size_bytes / 1e6:.3g} MB, its limit: single iterations are left out from "
            "here on, and counted all the same. Results stay exact; the run cannot be replayed beyond this "
            "point, for which it would need --trace-limit none"
        )
        super().write(Note(self._now, "info", text))

    def _look_again(self) -> None:
        """Try to write again; or a sign of life in place of iterations, rarely enough to add up to little."""
        if self._broken:
            self.flush()
            return
        self._again_at = self._now + max(AGAIN_S, min(10.0, self._now / 100))
        if self._books is not None:
            super().write(self._books.progress(self._now))

    def _end(self, event: RunEnded) -> None:
        """All that was left out is in the sums."""
        self._ended = True
        if self._full and self._left_out and self._books is not None:
            super().write(self._books.progress(event.t))
            super().write(self._gap("the limit of the trace"))
        if self._ever_left_out and self._books is not None:
            super().write(self._books.totals(event.t))
        super().write(event)
