"""One experiment: every run of its plan once, in turns, each kept as soon as it is over; then the table.

`cluster`, `fidelity`, `peers` and `strategies` are experiments. Each says which runs it takes, in which
places and in which order (`turns`), and what its table is (`rows`); what is the same for all is here.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.kept import EndedJob, KeptOutcomes


class PlannedJob(Protocol):
    """One run, before it is made."""

    def __hash__(self) -> int: ...

    @property
    def title(self) -> str:
        """Where, who, at which learning rate, with which seed."""
        ...


Work = TypeVar("Work", bound=PlannedJob)
Ended = TypeVar("Ended", bound=EndedJob[PlannedJob])
Who = TypeVar("Who")


class Turn(NamedTuple, Generic[Work, Who, Ended]):
    """Runs in one place, one after the other."""

    jobs: list[tuple[Work, Who]]
    opened: Callable[[], AbstractContextManager[Callable[[Work, Who, str], Ended]]]
    """Makes the place ready. What it gives carries out one run; the text is the run's title."""


class Experiment(NamedTuple, Generic[Work, Who, Ended]):
    """What is run, and what is made of it."""

    name: str
    results: KeptOutcomes[Work, Ended]
    total: Callable[[], int]
    """How many runs it takes, known ones included."""
    turns: Callable[[Path], Iterator[Turn[Work, Who, Ended]]]
    """Asked for one by one: earlier results may decide what later turns run. The folder is for files."""
    told: Callable[[Ended], str]
    """A run in one line."""
    rows: Callable[[], list[BenchRow]]


def carried_out(experiment: Experiment[Work, Who, Ended], plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Every run that is not known yet, then the table."""
    name, results = experiment.name, experiment.results
    if plan.results is not None:
        say(f"{name}: {len(results)} runs are in {plan.results} already; what is missing is added to it")
    try:
        run_all(experiment, say)
    except KeyboardInterrupt:
        if plan.results is not None:
            say(f"{name}: {len(results)} runs are in {plan.results}: the same command goes on from there")
        raise
    return experiment.rows()


def run_all(experiment: Experiment[Work, Who, Ended], say: Say) -> None:
    """Every run that is not known yet."""
    progress = _Progress(experiment.total(), say)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True) as folder:
        for turn in experiment.turns(Path(folder)):
            _take(turn, experiment, progress)


def _take(
    turn: Turn[Work, Who, Ended], experiment: Experiment[Work, Who, Ended], progress: _Progress
) -> None:
    results = experiment.results
    missing = {job: who for job, who in turn.jobs if results.get(job) is None}
    for job in dict.fromkeys(job for job, _ in turn.jobs if job not in missing):
        progress.known(job)
    if not missing:
        return
    with turn.opened() as run:
        for job, who in missing.items():
            outcome = run(job, who, progress.title(job))
            results.add(outcome)
            progress.made(job, experiment.told(outcome))


class _Progress:
    """Tells how far it is, and how long it will take by what runs took so far."""

    def __init__(self, total: int, say: Say) -> None:
        self._total, self._made, self._say = total, 0, say
        self._seen: set[PlannedJob] = set()
        self._began = time.monotonic()

    def title(self, job: PlannedJob) -> str:
        """Of the next run."""
        return f"{job.title} ({len(self._seen) + 1} of {self._total})"

    def known(self, job: PlannedJob) -> None:
        """There was nothing to do."""
        self._seen.add(job)

    def made(self, job: PlannedJob, told: str) -> None:
        """A run is over."""
        title = self.title(job)
        self._seen.add(job)
        self._made += 1
        left = (time.monotonic() - self._began) / self._made * max(0, self._total - len(self._seen)) / 60
        self._say(f"{title}: {told}; about {left:.0f} min left")
