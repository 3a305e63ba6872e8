"""Runs of the benchmark of a small cluster in virtual time: real gradients, simulated hosts.

The load of the machine does not matter, and the same command gives the same figures. Hosts share their links,
as those of a testbed do. DDP is simulated as the protocol `allreduce` with vectors that go around: everybody
computes, then all do a ring all-reduce.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

import msgspec

from paceline.bench.cluster import script as cluster_script
from paceline.bench.cluster.course import AccuracyCourse, judge_of
from paceline.bench.cluster.entries import Entry
from paceline.bench.cluster.other import NAME as DDP
from paceline.bench.cluster.results import Job, Outcome
from paceline.bench.cluster.scene import Scene
from paceline.bench.harness.bar import Bar
from paceline.config import RunConfig
from paceline.engines.control import Ended
from paceline.engines.local import LocalEngine
from paceline.errors import EngineLost, RunError
from paceline.sim.network.links import Fabric
from paceline.sim.request import ClusterRequest

LOOK_S = 0.2
STAND_IN = Entry("allreduce")
"""What DDP is in virtual time."""


class VirtualHosts:
    """The hosts of a scene, simulated."""

    def __init__(self, scene: Scene, data: Path, folder: Path) -> None:
        self._scene, self._data, self._folder = scene, data, folder
        self._judge = judge_of(scene, data)
        self._clusters: dict[Fabric, Path] = {
            fabric: folder / f"{scene.name}-{fabric}.toml" for fabric in ("star", "ring")
        }
        for fabric, path in self._clusters.items():
            path.write_text(scene.cluster(fabric))
        self._engine: LocalEngine | None = None
        self._number = 0

    def __enter__(self) -> VirtualHosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine is not None:
            self._engine.close()

    def run(self, job: Job, entry: Entry, bar: Bar) -> Outcome:
        """One run, to its end."""
        self._number += 1
        ddp = entry.protocol == DDP
        config = self._config(job, STAND_IN if ddp else entry, self._clusters["ring" if ddp else "star"])
        course = AccuracyCourse(self._scene, Path(config.folder), self._judge, limit_s=float("inf"))
        began, trouble = time.monotonic(), ""
        try:
            trouble = self._follow(config, course, bar)
        except EngineLost as error:
            self._engine, trouble = None, str(error)
        final = None if trouble else self._final(config)
        figures = course.figures(final) if course.seconds > 0 else None
        return Outcome(job=job, figures=figures, took_s=time.monotonic() - began, trouble=trouble)

    def _follow(self, config: RunConfig, course: AccuracyCourse, bar: Bar) -> str:
        """Until the run has ended; returns what went wrong."""
        trace = [Path(config.folder) / "trace.jsonl"]
        engine = self._engine = self._engine or LocalEngine(cluster_script.__file__)
        engine.launch(config)
        ended: Ended | None = None
        while ended is None:
            ended = engine.wait(LOOK_S)
            course.look(trace)
            bar.show(course.samples, course.best)
        failed = sorted(rank for rank, status in ended.statuses.items() if status != 0)
        if not failed and ended.store_status == 0:
            return ""
        logs = [Path(config.folder) / "logs" / f"rank{rank}.log" for rank in failed]
        said = [line for log in logs if log.exists() for line in log.read_text().splitlines()[-1:]]
        return f"ranks {failed} failed: {' '.join(said)}".rstrip(": ") if failed else "the store failed"

    def _final(self, config: RunConfig) -> float | None:
        """How good the weights are that the run has saved, where it is about that."""
        if not self._scene.epochs:
            return None
        weights = Path(config.folder) / "weights.safetensors"
        if not weights.exists():
            raise RunError(f"the run left no {weights}.")
        return self._judge(weights)

    def _config(self, job: Job, entry: Entry, cluster: Path) -> RunConfig:
        folder = self._folder / f"{job.scene}-{self._number}"
        folder.mkdir()
        config = RunConfig(
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
            cluster=msgspec.to_builtins(ClusterRequest(file=str(cluster)), str_keys=True),
        )
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
        return config
