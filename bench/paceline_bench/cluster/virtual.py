"""Runs of the benchmark of a small cluster in virtual time: real gradients, simulated hosts.

The load of the machine does not matter, and the same command gives the same figures. Hosts share their links,
as those of a testbed do. DDP is simulated as the protocol `allreduce` with vectors that go around: everybody
computes, then all do a ring all-reduce.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from paceline.config import RunConfig
from paceline.errors import EngineLost, RunError
from paceline.sim.network.links import Fabric
from paceline_bench.cluster import script as cluster_script
from paceline_bench.cluster.course import AccuracyCourse, judge_of
from paceline_bench.cluster.entries import Entry
from paceline_bench.cluster.other import NAME as DDP
from paceline_bench.cluster.results import Job, Outcome
from paceline_bench.cluster.scene import Scene
from paceline_bench.exact import ExactRuns, trouble, virtual
from paceline_bench.harness.bar import Bar

STAND_IN = Entry("allreduce")
"""What DDP is in virtual time."""


class VirtualHosts:
    """The hosts of a scene, simulated."""

    def __init__(self, scene: Scene, data: Path, folder: Path) -> None:
        self._scene, self._data, self._folder = scene, data, folder
        self._judge = judge_of(scene, data)
        self._runs = ExactRuns(cluster_script.__file__)
        self._number = 0

    def __enter__(self) -> VirtualHosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runs.close()

    def run(self, job: Job, entry: Entry, bar: Bar) -> Outcome:
        """One run, to its end."""
        self._number += 1
        config = self._config(job, STAND_IN if entry.protocol == DDP else entry, self._cluster(entry))
        course = AccuracyCourse(self._scene, Path(config.folder), self._judge, limit_s=float("inf"))
        began = time.monotonic()
        try:
            wrong = self._follow(config, course, bar)
        except EngineLost as error:
            wrong = str(error)
        final = None if wrong else self._final(config)
        figures = course.figures(final) if course.seconds > 0 else None
        return Outcome(job=job, figures=figures, took_s=time.monotonic() - began, trouble=wrong)

    def _follow(self, config: RunConfig, course: AccuracyCourse, bar: Bar) -> str:
        """Until the run has ended; returns what went wrong."""

        def look() -> None:
            course.look([config.path / "trace.jsonl"])
            bar.show(course.samples, course.best)

        return trouble(config, self._runs.run(config, look))

    def _final(self, config: RunConfig) -> float | None:
        """How good the weights are that the run has saved, where it is about that."""
        if not self._scene.epochs:
            return None
        weights = Path(config.folder) / "weights.safetensors"
        if not weights.exists():
            raise RunError(f"the run left no {weights}.")
        return self._judge(weights)

    def _cluster(self, entry: Entry) -> Path:
        """The file of the hosts as they are for an entry."""
        fabric: Fabric = "ring" if entry.protocol == DDP else "star"
        path = self._folder / f"{self._scene.name}-{fabric}-{entry.store_hosts}.toml"
        path.write_text(self._scene.cluster(fabric, entry.store_hosts))
        return path

    def _config(self, job: Job, entry: Entry, cluster: Path) -> RunConfig:
        folder = self._folder / f"{job.scene}-{self._number}"
        folder.mkdir()
        return RunConfig(
            run=folder.name,
            folder=str(folder),
            script=cluster_script.__file__,
            args=tuple(job.words(self._scene, self._data)),
            workers=self._scene.workers,
            protocol=entry.protocol,
            settings=dict(entry.settings),
            balance=entry.balance,
            correct=entry.correct,
            seed=job.seed,
            cluster=virtual(cluster),
        )
