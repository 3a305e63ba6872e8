"""The runs of the comparison, in order: seeds, then scenes, then sides: all take turns.

Everybody tries the same learning rates with the first seed, and runs the others with its best. A worker is
killed with that one too. Who cannot run has an outcome with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from paceline_bench.cluster.results import Job, Outcome, Results, job_of
from paceline_bench.cluster.scene import Scene
from paceline_bench.cluster.series import SeriesProgress, best_of
from paceline_bench.harness.bar import Bar
from paceline_bench.harness.plan import Say
from paceline_bench.rivals.hosts import PeerHosts
from paceline_bench.rivals.roster import Found, Rival, Side


class Contest(NamedTuple):
    """Who, where, with what."""

    trained: Scene
    killed: Scene
    sides: list[Side]
    found: dict[str, Found]
    """By title."""
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    version: str

    @property
    def scenes(self) -> tuple[Scene, Scene]:
        """To an accuracy first."""
        return self.trained, self.killed

    def tried(self, side: Side) -> list[Job]:
        """The first seed's runs to an accuracy: one per learning rate."""
        rates = self.rates or (self._usual(self.trained, side),)
        return [self.job(self.trained, side, lr, self.seeds[0]) for lr in rates]

    def _usual(self, scene: Scene, side: Side) -> float:
        """Without rates to try. Ours counts a push 1/N; a server of whole steps gets a rate as much lower."""
        whole = isinstance(side, Rival) and side.stale
        return side.rate(scene.lr) / (scene.workers if whole else 1)

    def jobs(self, scene: Scene, side: Side, seed: int, results: Results) -> list[Job]:
        """A side's runs in a scene with a seed, as far as it is known which these are."""
        if scene == self.trained and seed == self.seeds[0]:
            return self.tried(side)
        if (
            scene != self.trained and self.trained.task != scene.task
        ):  # rates of one task say nothing of another
            return [self.job(scene, side, self._usual(scene, side), seed)]
        return [self.job(scene, side, best_of(self.trained, self.tried(side), results).lr, seed)]

    def job(self, scene: Scene, side: Side, lr: float, seed: int) -> Job:
        """One run."""
        return job_of(scene, side.title, lr, seed, False, self.version)


Opened = Callable[[Scene], AbstractContextManager[PeerHosts]]
Told = Callable[[Outcome, Scene], str]


def run_all(contest: Contest, opened: Opened, results: Results, say: Say, told: Told) -> None:
    """Every run that is not known yet."""
    total = sum(
        len(contest.jobs(scene, side, seed, results))
        for seed in contest.seeds
        for scene in contest.scenes
        for side in contest.sides
    )
    progress = SeriesProgress(total, say)
    for seed in contest.seeds:
        for scene in contest.scenes:
            _pass(contest, scene, seed, opened, results, progress, told)


def _pass(
    contest: Contest,
    scene: Scene,
    seed: int,
    opened: Opened,
    results: Results,
    progress: SeriesProgress,
    told: Told,
) -> None:
    todo = [(job, side) for side in contest.sides for job in contest.jobs(scene, side, seed, results)]
    missing = [(job, side) for job, side in todo if results.get(job) is None]
    for job, _ in todo:
        if results.get(job) is not None:
            progress.done(job, "", made=False)
    if not missing:
        return
    with opened(scene) as hosts:
        for job, side in missing:
            outcome = _outcome(contest, scene, job, side, hosts, progress)
            results.add(outcome)
            progress.done(job, told(outcome, scene), made=True)


def _outcome(
    contest: Contest, scene: Scene, job: Job, side: Side, hosts: PeerHosts, progress: SeriesProgress
) -> Outcome:
    found = contest.found.get(side.title, Found())
    if found.reason:
        return Outcome(job=job, figures=None, trouble=found.reason)
    target = scene.targets[-1] if scene.targets else 1.0
    with Bar(progress.title(job), scene.limit_s, target) as bar:
        return hosts.run(job, side, found, bar)
