"""The runs that a table takes, in order: seeds, then scenes, then sides, with each side's learning rates.

With several learning rates the first seed decides which suits a side best; the others run with that one. Some
keep their own. Seeds come in passes, so that an early end leaves complete ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from paceline_bench.cluster.results import Job, Outcome, Results, job_of
from paceline_bench.cluster.scene import Scene
from paceline_bench.experiment import Experiment, Turn
from paceline_bench.harness.bar import Bar
from paceline_bench.harness.record import BenchRow


class Compared(Protocol):
    """Who takes part."""

    @property
    def title(self) -> str:
        """Its name in the table."""
        ...

    def rates(self, given: tuple[float, ...], scene: Scene) -> tuple[float, ...]:
        """The learning rates that it tries, when these are given."""
        ...


Someone = TypeVar("Someone", bound=Compared)
SomeoneIn = TypeVar("SomeoneIn", bound=Compared, contravariant=True)


class Hosts(Protocol[SomeoneIn]):
    """Where runs take place."""

    def run(self, job: Job, side: SomeoneIn, bar: Bar) -> Outcome:
        """One run, to its end."""
        ...


Opened = Callable[["Series[Someone]", Path], AbstractContextManager[Hosts[Someone]]]
"""Makes the hosts of a series ready; the folder is for files."""


class Series(NamedTuple, Generic[Someone]):
    """What is to be run in one scene."""

    scene: Scene
    sides: Sequence[Someone]
    rates: tuple[float, ...]
    """To choose from, for sides without one of their own; none: what is sensible for each."""
    seeds: tuple[int, ...]
    simulated: bool
    version: str
    after: Series[Someone] | None = None
    """Where the best rates were found, if not here."""

    def tried(self, side: Someone) -> list[Job]:
        """The first seed's runs: one per learning rate."""
        return [self.job(side, lr, self.seeds[0]) for lr in side.rates(self.rates, self.scene)]

    def best(self, side: Someone, results: Results) -> Job:
        """The run with the rate that suits a side best."""
        series = self.after or self
        return best_of(series.scene, series.tried(side), results)

    def jobs(self, side: Someone, seed: int, results: Results) -> list[Job]:
        """The runs of a side with a seed, as far as it is known which these are."""
        if self.after is None and seed == self.seeds[0]:
            return self.tried(side)
        return [self.job(side, self.best(side, results).lr, seed)]

    def outcomes(self, side: Someone, results: Results) -> list[Outcome]:
        """Of every seed, with the rate that suits the side best."""
        lr = self.best(side, results).lr
        found = [results.get(self.job(side, lr, seed)) for seed in self.seeds]
        return [outcome for outcome in found if outcome is not None]

    def job(self, side: Someone, lr: float, seed: int) -> Job:
        """One run."""
        return job_of(self.scene, side.title, lr, seed, self.simulated, self.version)


def best_of(scene: Scene, jobs: list[Job], results: Results) -> Job:
    """The one that was soonest at the last target, or got furthest."""
    return min(jobs, key=lambda job: _rank(scene, results.get(job)))


def _rank(scene: Scene, outcome: Outcome | None) -> tuple[float, ...]:
    if outcome is None or outcome.figures is None:
        return (inf,) * (len(scene.targets) + 1)
    times = [outcome.to(target) for target in reversed(scene.targets)]
    best = outcome.figures.best if scene.targets else outcome.figures.accuracy
    return (*(inf if each is None else each.seconds for each in times), -(best or 0.0))


def on_hosts(
    name: str,
    series: Sequence[Series[Someone]],
    results: Results,
    opened: Opened[Someone],
    told: Callable[[Outcome, Scene], str],
    rows: Callable[[], list[BenchRow]],
) -> Experiment[Job, Someone, Outcome]:
    """The experiment that consists of these series, each on hosts of its own."""
    scenes = {each.scene.name: each.scene for each in series}

    def passes() -> Iterator[tuple[Series[Someone], int]]:
        for number in range(max(len(each.seeds) for each in series)):
            yield from ((each, each.seeds[number]) for each in series if number < len(each.seeds))

    def jobs(each: Series[Someone], seed: int) -> list[tuple[Job, Someone]]:
        return [(job, side) for side in each.sides for job in each.jobs(side, seed, results)]

    @contextmanager
    def ready(each: Series[Someone], folder: Path) -> Iterator[Callable[[Job, Someone, str], Outcome]]:
        """Hosts that show a bar while they are at it."""
        scene = each.scene
        limit = scene.limit_samples if each.simulated else scene.limit_s
        with opened(each, Path(tempfile.mkdtemp(dir=folder))) as hosts:

            def run(job: Job, side: Someone, title: str) -> Outcome:
                with Bar(title, limit, scene.targets[-1] if scene.targets else 1.0) as bar:
                    return hosts.run(job, side, bar)

            yield run

    def turns(folder: Path) -> Iterator[Turn[Job, Someone, Outcome]]:
        for each, seed in passes():
            yield Turn(jobs(each, seed), partial(ready, each, folder))

    return Experiment(
        name,
        results,
        lambda: sum(len(jobs(each, seed)) for each, seed in passes()),
        turns,
        lambda outcome: told(outcome, scenes[outcome.job.scene]),
        rows,
    )
