"""The runs that a table takes, in order: scenes, entries, learning rates, seeds.

With several learning rates the first seed decides which suits an entry best; the others run with that one.
DDP's own is known. Seeds come in passes, so that an early end leaves complete ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf
from typing import NamedTuple, Protocol

from paceline_bench.cluster.entries import Entry
from paceline_bench.cluster.other import NAME as DDP
from paceline_bench.cluster.results import Job, Outcome, Results, job_of
from paceline_bench.cluster.scene import Scene
from paceline_bench.harness.bar import Bar
from paceline_bench.harness.plan import Say


class Hosts(Protocol):
    """Where runs take place."""

    def run(self, job: Job, entry: Entry, bar: Bar) -> Outcome:
        """One run, to its end."""
        ...


Opened = Callable[[Scene], AbstractContextManager[Hosts]]


class Series(NamedTuple):
    """What is to be run in one scene."""

    scene: Scene
    entries: list[Entry]
    rates: tuple[float, ...]
    """To choose from, for entries without one of their own; none: what is sensible for each."""
    seeds: tuple[int, ...]
    simulated: bool
    version: str

    def jobs(self, entry: Entry, seed: int, results: Results) -> list[Job]:
        """The runs of an entry with a seed, as far as it is known which these are."""
        rates = (
            self.rates
            if self.rates and entry.lr is None and entry.protocol != DDP
            else (entry.rate(self.scene.lr),)
        )
        tried = [self._job(entry, rate, self.seeds[0]) for rate in rates]
        if seed == self.seeds[0]:
            return tried
        return [self._job(entry, best_of(self.scene, tried, results).lr, seed)]

    def _job(self, entry: Entry, lr: float, seed: int) -> Job:
        return job_of(self.scene, entry.title, lr, seed, self.simulated, self.version)


def best_of(scene: Scene, jobs: list[Job], results: Results) -> Job:
    """The one that was soonest at the last target, or got furthest."""
    return min(jobs, key=lambda job: _rank(scene, results.get(job)))


def _rank(scene: Scene, outcome: Outcome | None) -> tuple[float, ...]:
    if outcome is None or outcome.figures is None:
        return (inf,) * (len(scene.targets) + 1)
    times = [outcome.to(target) for target in reversed(scene.targets)]
    best = outcome.figures.best if scene.targets else outcome.figures.accuracy
    return (*(inf if each is None else each.seconds for each in times), -(best or 0.0))


class SeriesProgress:
    """Tells how far it is, and how long it will take by what runs took so far."""

    def __init__(self, total: int, say: Say) -> None:
        self._total, self._done, self._made, self._say = total, 0, 0, say
        self._began = time.monotonic()

    def title(self, job: Job) -> str:
        """Of the next run."""
        return f"{job.scene}, {job.entry} @{job.lr:g}, seed {job.seed} ({self._done + 1} of {self._total})"

    def done(self, job: Job, told: str, made: bool) -> None:
        """A run is over, or was known."""
        title = self.title(job)
        self._done += 1
        self._made += made
        left = (time.monotonic() - self._began) / max(1, self._made) * (self._total - self._done) / 60
        if made:
            self._say(f"{title}: {told}; about {left:.0f} min left")


def run_all(
    series: list[Series], opened: Opened, results: Results, say: Say, told: Callable[..., str]
) -> None:
    """Every run that is not known yet, seed by seed."""
    total = sum(
        len(each.jobs(entry, seed, results))
        for each in series
        for entry in each.entries
        for seed in each.seeds
    )
    progress = SeriesProgress(total, say)
    for number in range(max(len(each.seeds) for each in series)):
        for each in series:
            if number < len(each.seeds):
                _pass(each, each.seeds[number], opened, results, progress, told)


def _pass(
    series: Series,
    seed: int,
    opened: Opened,
    results: Results,
    progress: SeriesProgress,
    told: Callable[..., str],
) -> None:
    scene = series.scene
    todo = [(job, entry) for entry in series.entries for job in series.jobs(entry, seed, results)]
    for job, _ in todo:
        known = results.get(job)
        if known is not None:
            progress.done(job, "", made=False)
    missing = [(job, entry) for job, entry in todo if results.get(job) is None]
    if not missing:
        return
    with opened(scene) as hosts:
        for job, entry in missing:
            limit = scene.limit_samples if series.simulated else scene.limit_s
            with Bar(progress.title(job), limit, scene.targets[-1] if scene.targets else 1.0) as bar:
                outcome = hosts.run(job, entry, bar)
            results.add(outcome)
            progress.done(job, told(outcome, scene), made=True)
