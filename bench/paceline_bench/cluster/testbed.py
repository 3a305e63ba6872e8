"""Runs of the benchmark of a small cluster on the hosts of a testbed, in real time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.errors import RunError
from paceline.testbed import Testbed
from paceline_bench.cluster.course import AccuracyCourse, judge_of
from paceline_bench.cluster.entries import Entry
from paceline_bench.cluster.hosts import (
    FIRST_PORT,
    HostProcesses,
    OtherProcesses,
    OurProcesses,
    Stalls,
    bytes_over,
)
from paceline_bench.cluster.other import NAME as DDP
from paceline_bench.cluster.results import Job, Outcome
from paceline_bench.cluster.scene import Scene
from paceline_bench.harness.bar import Bar

LOOK_S = 0.1
SILENT_S = 120.0
"""How long a run may take until somebody has taken a step, and how long all may be silent later."""

Follow = Callable[[AccuracyCourse], str]
"""Looks at a run until it has seen enough; gives the trouble there was, or nothing."""


class BedHosts:
    """The hosts of a scene, on a testbed; every run is started anew on them."""

    def __init__(self, scene: Scene, data: Path, folder: Path) -> None:
        self._scene, self._data, self._folder = scene, data, folder
        self._judge = judge_of(scene, data)
        self._number = 0
        self._bed: Testbed | None = None

    def __enter__(self) -> Self:
        self._bed = self._scene.testbed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._bed is not None
        self._bed.down()

    @property
    def bed(self) -> Testbed:
        """Where runs are."""
        assert self._bed is not None, "within a with statement"
        return self._bed

    def place(self, job: Job) -> tuple[list[str], Path, int]:
        """What the next run is told, where it writes, and where it listens."""
        self._number += 1
        words, folder = job.words(self._scene, self._data), self._folder / str(self._number)
        return words, folder, FIRST_PORT + self._number

    def see_through(self, job: Job, run: HostProcesses, follow: Follow) -> Outcome:
        """Start a run, follow it to what is its end here, and stop it."""
        began, link = time.monotonic(), self.bed[self._scene.slow_link]
        before, course = bytes_over(link), AccuracyCourse(self._scene, run.copies, self._judge)
        try:
            run.start()
            trouble = follow(course)
        except RunError as error:  # one that fails does not end the others
            trouble = str(error)
        finally:
            moved = bytes_over(link) - before
            run.stop()
        figures = course.figures() if course.seconds > 0 else None
        took_s = time.monotonic() - began
        return Outcome(job=job, figures=figures, took_s=took_s, slow_link_bytes=moved, trouble=trouble)

    def watch(self, run: HostProcesses, course: AccuracyCourse, bar: Bar) -> str:
        """Until the last target, the limit, or trouble, which is returned."""
        return watch(self._scene, run, course, bar, Stalls(self._scene, self.bed))


class RealHosts(BedHosts):
    """What runs of ours and of DDP are started on."""

    def run(self, job: Job, entry: Entry, bar: Bar) -> Outcome:
        """One run, until it is there or too late."""
        place = self.place(job)
        run: HostProcesses
        if entry.protocol == DDP:
            run = OtherProcesses(self._scene, self.bed, *place)
        else:
            run = OurProcesses(self._scene, self.bed, entry, *place)
        return self.see_through(job, run, lambda course: self.watch(run, course, bar))


def watch(scene: Scene, run: HostProcesses, course: AccuracyCourse, bar: Bar, stalls: Stalls) -> str:
    """Until the last target, the limit, or trouble, which is returned."""
    seconds, heard = 0.0, time.monotonic()
    with stalls:
        while not course.is_over and course.seconds < scene.limit_s:
            trouble = run.failure()
            course.look(run.traces)
            stalls.look(course.seconds)
            bar.show(course.seconds, course.best)
            if trouble is not None:
                return trouble
            if course.seconds > seconds:
                seconds, heard = course.seconds, time.monotonic()
            if time.monotonic() - heard > SILENT_S:
                return f"nothing was heard of it for {SILENT_S:g} s"
            time.sleep(LOOK_S)
    return ""
