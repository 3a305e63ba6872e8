"""A run while it goes on.

`RunProgress` is fed events and can be drawn at any time; `live` keeps it on the screen. It draws on
standard error: standard output belongs to what a command was asked for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from paceline.trace import Tally
from paceline.trace.events import (
    AnyEvent,
    Gap,
    Heard,
    Kept,
    LeadPassed,
    ModelReady,
    Note,
    Planned,
    Progress,
    Silent,
    WorkEnded,
    WorkerLeft,
)
from paceline.trace.waits import waiting_words
from paceline.view import figures
from paceline.view.palette import terminal_colour
from paceline.view.terminal.workers import SILENT, STATES, Workers
from paceline.view.terminal.workers_table import MANY_WORKERS, SLOWEST_SHOWN, state_line, workers_table

REFRESH_PER_S = 8
PLAIN_LINE_EVERY_S = 5.0
RATE_OVER_S = 10.0
STARTING = "starting: every worker imports PyTorch and the script"
_NOTE_STYLES = {"info": "dim", "warning": "yellow", "error": "bold red"}


class RunProgress:
    """Where a run stands. Feed it with `add`; draw it with `live` or `console.print(progress)`."""

    def __init__(
        self,
        total_samples: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_samples = total_samples
        """What makes 100 %. When not given, what the run itself says it plans; else unknown."""
        self.console = console or Console(stderr=True)
        self.tally = Tally()
        self.workers = Workers()
        self._clock = clock
        self._lock = RLock()
        self._given = total_samples is not None
        self._epochs: int | None = None
        self._before = 0
        self._summary: Progress | None = None
        self._silent: dict[int, Silent] = {}
        self._arrived = clock()
        self._rate = _Rate()
        self._pace = _Rate()
        self._spinner = Spinner("dots")
        self._lead_scale = 8
        self._shown = False
        self._plain_at: float | None = None

    def add(self, event: AnyEvent) -> None:
        """Take the next event. While shown, notes and lost workers are also printed above the view."""
        with self._lock:
            self.tally.add(event)
            self.workers.add(event)
            self._note(event)
            self._arrived = self._clock()
            self._rate.add(self.tally.now, self.samples)
            self._pace.add(self._arrived, self.samples)
        self._say(event)
        self._plain_line_if_due()

    def print(self, text: str, style: str = "") -> None:
        """Print above the live view: a worker's output, or a note. Never wrapped, never read as markup."""
        line = Text.from_ansi(text)
        line.stylize(style)
        self.console.print(line, soft_wrap=True)

    def render(self) -> RenderableType:
        """The view as it stands."""
        with self._lock:
            parts: list[RenderableType] = [self._head(), ""]
            table = self._workers()
            if table is not None:
                parts += [table, ""]
            return Group(*parts, self._bar(), self._figures(), *self._silences())

    def __rich__(self) -> RenderableType:
        return self.render()

    def line(self) -> str:
        """The view as one plain line."""
        with self._lock:
            if not (self.samples or self.workers.by_rank or self._summary):
                return STARTING
            known = [words for words in self._figure_words() if figures.DASH not in words]
            parts = [figures.stopwatch(self.elapsed_s), self._done_words(), *known]
            left = self.left_s
            if left is not None:
                parts.append(f"{figures.stopwatch(left)} left")
            return " · ".join([*parts, self._states_words()]).removesuffix(" · ")

    @property
    def samples(self) -> int:
        """Samples done so far."""
        return self.tally.samples

    @property
    def elapsed_s(self) -> float:
        """The run's own clock, kept going between events; virtual time advances with events only."""
        tally = self.tally
        if tally.start is None or tally.start.simulated or tally.end is not None:
            return tally.now
        return tally.now + max(0.0, self._clock() - self._arrived)

    @property
    def left_s(self) -> float | None:
        """Time that is left for the person who waits: in a simulation, not the virtual time."""
        start = self.tally.start
        rate = (self._pace if start is not None and start.simulated else self._rate).per_s
        if self.total_samples is None or not rate or self.tally.end is not None:
            return None
        return max(0.0, (self.total_samples - self.samples) / rate)

    def _note(self, event: AnyEvent) -> None:
        if isinstance(event, Silent):
            self._silent[event.worker] = event
        elif isinstance(event, Progress):
            self._summary = event
        elif isinstance(event, Planned):
            self._epochs, self._before = event.epochs, event.before
        per_epoch = self.tally.model.samples_per_epoch if self.tally.model else None
        if isinstance(event, Planned | ModelReady) and self._epochs and per_epoch and not self._given:
            self.total_samples = max(0, self._epochs * per_epoch - self._before)

    def _head(self) -> Text:
        start = self.tally.start
        if start is None:
            return Text(STARTING, style="dim")
        title = Text(figures.title(start, start.settings))
        title.stylize(f"bold {terminal_colour(start.protocol)}", 0, len(start.protocol))
        more = [figures.plural(start.workers, "worker"), start.run]
        if start.simulated or start.emulated:
            more.append("simulated" if start.simulated else "emulated")
        title.append(" · " + " · ".join(more), style="dim")
        title.truncate(self.console.width, overflow="ellipsis")
        return title

    def _workers(self) -> RenderableType | None:
        if self._summary is not None:
            return Text(self._summary_words(self._summary))
        if not self.workers.by_rank or (self.tally.start is not None and self.tally.start.summarised):
            return None
        leads = self.workers.leads()
        self._lead_scale = max(self._lead_scale, *leads.values(), 0)
        shares = self.tally.result().waiting_share if self.tally.start else []
        waited = dict(enumerate(shares))
        if len(self.workers.by_rank) <= MANY_WORKERS:
            return workers_table(self.workers.ranked(), leads, waited, self._lead_scale, self.console.width)
        shown = self.workers.slowest_first(SLOWEST_SHOWN)
        table = workers_table(shown, leads, waited, self._lead_scale, self.console.width)
        return Group(state_line(self.workers), Text("the slowest:", style="dim"), table)

    def _bar(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        done: RenderableType = self._spinner
        if self.total_samples:
            done = ProgressBar(total=self.total_samples, completed=min(self.samples, self.total_samples))
        elif self.tally.end is not None:
            done = Text(self.tally.end.status)
        grid.add_row(done, Text(f"{self._done_words()} · {self._time_words()}"))
        return grid

    def _figures(self) -> Text:
        return Text(" · ".join(self._figure_words()), style="dim", overflow="ellipsis", no_wrap=True)

    def _silences(self) -> list[RenderableType]:
        """Who is silent, for how long by now, and who waits for it."""
        still = [x for x in self._silent.values() if self.workers.by_rank[x.worker].state == SILENT]
        return [
            Text(
                f"rank {x.worker} is silent for {figures.stopwatch(self.elapsed_s - x.t + x.seconds)}; "
                f"{waiting_words(x.waiting)}",
                style="bold red",
            )
            for x in still
        ]

    def _figure_words(self) -> list[str]:
        tally = self.tally
        words = [f"{figures.known(self._rate.per_s, figures.rate)} samples/s"]
        words.append(f"loss {figures.known(tally.loss, figures.number)}")
        words.append(f"accuracy {figures.known(tally.accuracy, figures.accuracy)}{self._of_when()}")
        return words

    def _of_when(self) -> str:
        """Of which moment the accuracy is, once the run is over."""
        if self.tally.start is None or self.tally.end is None:
            return ""
        result = self.tally.result()
        return figures.moment(result, result.accuracy_at)

    def _done_words(self) -> str:
        if self.total_samples:
            share = min(1.0, self.samples / self.total_samples)
            return f"{100 * share:.0f} % of {figures.count(self.total_samples)}"
        per_epoch = self.tally.model.samples_per_epoch if self.tally.model else None
        epoch = f"epoch {self.samples // per_epoch + 1} · " if per_epoch else ""
        if self.tally.pushes and not self.samples:  # nobody counts them
            return f"{figures.count(self.tally.pushes)} iterations"
        return f"{epoch}{figures.count(self.samples)} samples"

    def _time_words(self) -> str:
        left = self.left_s
        words = figures.stopwatch(self.elapsed_s)
        return words if left is None else f"{words} · {figures.stopwatch(left)} left"

    def _states_words(self) -> str:
        if self._summary is not None:
            return self._summary_words(self._summary)
        states = self.workers.states()
        return ", ".join(f"{states[state]} {state}" for state in STATES if states[state])

    def _summary_words(self, now: Progress) -> str:
        return f"{figures.count(now.waiting)} waiting · iterations {now.slowest:,} to {now.fastest:,}"

    def _say(self, event: AnyEvent) -> None:
        if not self._shown:
            return
        if isinstance(event, Note):
            prefix = "" if event.level == "info" else f"{event.level}: "
            self.print(prefix + event.text, _NOTE_STYLES[event.level])
        elif isinstance(event, Silent):
            self.print(f"warning: {event.text}", _NOTE_STYLES["warning"])
        elif isinstance(event, WorkEnded | Heard | LeadPassed):
            self.print(event.text, _NOTE_STYLES["info"])
        elif isinstance(event, Gap) and not event.wanted:
            self.print(f"warning: {event.text}", _NOTE_STYLES["warning"])
        elif isinstance(event, Kept):
            self.print(f"checkpoint after {event.version:,} updates", _NOTE_STYLES["info"])
        elif isinstance(event, WorkerLeft) and event.reason in ("died", "failed"):
            detail = f": {event.detail}" if event.detail else ""
            self.print(f"rank {event.worker} {event.reason}{detail}", "red")

    def _plain_line_if_due(self) -> None:
        now = self._clock()
        if self._plain_at is not None and now >= self._plain_at:
            self._plain_at = now + PLAIN_LINE_EVERY_S
            self.print(self.line())

    @contextmanager
    def _showing(self, plain: bool) -> Iterator[None]:
        self._shown = True
        self._plain_at = self._clock() + PLAIN_LINE_EVERY_S if plain else None
        try:
            yield
        finally:
            self._shown, self._plain_at = False, None


class _Rate:
    """Samples per second over the last stretch of time, from marks set a moment apart."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    @property
    def per_s(self) -> float | None:
        """None before two marks."""
        if len(self._marks) < 2:
            return None
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s and last > first else None

    def add(self, now_s: float, samples: int) -> None:
        """Mark where the run stands."""
        marks = self._marks
        if len(marks) > 1 and now_s - marks[-2][0] < RATE_OVER_S / 40:
            marks.pop()
        marks.append((now_s, samples))
        while len(marks) > 2 and now_s - marks[1][0] > RATE_OVER_S:
            marks.popleft()


@contextmanager
def live(progress: RunProgress, plain: bool = False) -> Iterator[RunProgress]:
    """Keep a run's progress on the screen, or, without a terminal or `plain`, say a line now and then.

    The view disappears at the end, since a summary follows; after an exception its last state stays.
    Standard output is left alone, so that a command may print its JSON there.
    """
    console = progress.console
    if plain or not console.is_terminal or console.is_dumb_terminal:
        with progress._showing(plain=True):
            yield progress
        return
    view = Live(
        progress, console=console, refresh_per_second=REFRESH_PER_S, redirect_stdout=False, transient=True
    )
    with progress._showing(plain=False), view:
        try:
            yield progress
        except BaseException:
            view.transient = False
            raise
