"""Runs of the benchmark of a small cluster on the hosts of a testbed, in real time."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from paceline.bench.cluster.course import AccuracyCourse, judge_of
from paceline.bench.cluster.entries import Entry
from paceline.bench.cluster.hosts import (
    FIRST_PORT,
    HostProcesses,
    OtherProcesses,
    OurProcesses,
    Stalls,
    bytes_over,
)
from paceline.bench.cluster.other import NAME as DDP
from paceline.bench.cluster.results import Job, Outcome
from paceline.bench.cluster.scene import Scene
from paceline.bench.harness.bar import Bar
from paceline.errors import RunError
from paceline.testbed import Testbed

LOOK_S = 0.1
SILENT_S = 120.0
"""How long a run may take until somebody has taken a step, and how long all may be silent later."""


class RealHosts:
    """The hosts of a scene."""

    def __init__(self, scene: Scene, data: Path, folder: Path) -> None:
        self._scene, self._data, self._folder = scene, data, folder
        self._judge = judge_of(scene, data)
        self._number = 0
        self._bed: Testbed | None = None

    def __enter__(self) -> RealHosts:
        self._bed = self._scene.testbed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._bed is not None
        self._bed.down()

    def run(self, job: Job, entry: Entry, bar: Bar) -> Outcome:
        """Start a run, look at it until it is there or too late, and stop it."""
        assert self._bed is not None
        scene, link, began = self._scene, self._bed[self._scene.slow_link], time.monotonic()
        words, folder = job.words(scene, self._data), self._folder / str(self._number)
        place = (words, folder, FIRST_PORT + self._number)
        run: HostProcesses
        if entry.protocol == DDP:
            run = OtherProcesses(scene, self._bed, *place)
        else:
            run = OurProcesses(scene, self._bed, entry, *place)
        self._number += 1
        before, course = bytes_over(link), AccuracyCourse(scene, run.copies, self._judge)
        try:
            run.start()
            trouble = watch(scene, run, course, bar, Stalls(scene, self._bed))
        except RunError as error:  # one that fails does not end the others
            trouble = str(error)
        finally:
            moved = bytes_over(link) - before
            run.stop()
        figures = course.figures() if course.seconds > 0 else None
        took_s = time.monotonic() - began
        return Outcome(job=job, figures=figures, took_s=took_s, slow_link_bytes=moved, trouble=trouble)


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
