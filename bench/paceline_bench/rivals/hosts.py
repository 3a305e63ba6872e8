"""Runs of rivals and of ours on a testbed: to an accuracy, or with a worker killed in the middle."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec

from paceline.errors import RunError
from paceline_bench.cluster.course import AccuracyCourse
from paceline_bench.cluster.hosts import HostProcesses, OurProcesses
from paceline_bench.cluster.results import Job, Outcome
from paceline_bench.cluster.scene import Scene
from paceline_bench.cluster.script import pid_of
from paceline_bench.cluster.tasks import TASKS
from paceline_bench.cluster.testbed import BedHosts
from paceline_bench.harness.bar import Bar
from paceline_bench.rivals.killed import Killed, applied, steps_of, stood_still_s
from paceline_bench.rivals.launch import ATTEMPTS, RivalProcesses
from paceline_bench.rivals.roster import Found, Rival, Side
from paceline_bench.rivals.scene import VICTIM

LOOK_S = 0.05
SILENT_S = 180.0
"""How long a job may take until its first step."""
LONGEST = 3
"""How many times as long as it may be silent a job may go on after a death."""


class PeerHosts(BedHosts):
    """What runs of ours and of rivals are started on."""

    def __init__(self, scene: Scene, data: Path, folder: Path, found: dict[str, Found]) -> None:
        """`found`: where every rival is, by its title."""
        super().__init__(scene, data, folder)
        self._found = found

    def run(self, job: Job, side: Side, bar: Bar) -> Outcome:
        """One run, to its end; or why it cannot be."""
        found = self._found.get(side.title, Found())
        if found.reason:
            return Outcome(job=job, figures=None, trouble=found.reason)
        run, killed = self._processes(job, side, found), None

        def follow(course: AccuracyCourse) -> str:
            nonlocal killed
            if not self._scene.epochs:
                return self.watch(run, course, bar)
            killed = self._kill(run, course, bar, self._planned())
            return ""

        outcome = self.see_through(job, run, follow)
        return msgspec.structs.replace(outcome, killed=killed, about=found.version)

    def _processes(self, job: Job, side: Side, found: Found) -> HostProcesses:
        place = self.place(job)
        if isinstance(side, Rival):
            return RivalProcesses(self._scene, self.bed, side, found, *place)
        return OurProcesses(self._scene, self.bed, side, *place)

    def _kill(self, run: HostProcesses, course: AccuracyCourse, bar: Bar, planned: int) -> Killed:
        """Kill a worker when half of the work is done, and see what the others do."""
        self._await_half(run, course, bar, planned)
        os.kill(int(pid_of(run.copies, VICTIM).read_text()), signal.SIGKILL)
        at = heard = time.monotonic()
        while None in run.statuses.values() and time.monotonic() - heard < self._scene.limit_s:
            samples = course.samples
            course.look(_there(run))
            if course.samples > samples and time.monotonic() - at < LONGEST * self._scene.limit_s:
                heard = time.monotonic()
            bar.show(min(course.seconds, self._scene.limit_s), None)
            time.sleep(LOOK_S)
        return self._fate(run, planned, time.monotonic() - at)

    def _await_half(self, run: HostProcesses, course: AccuracyCourse, bar: Bar, planned: int) -> None:
        deadline = time.monotonic() + SILENT_S
        while course.samples < planned / 2:
            trouble = run.failure()
            if trouble is not None:
                raise RunError(f"ended before anybody was killed: {trouble}")
            if time.monotonic() > deadline:
                raise RunError(f"not half done within {SILENT_S:g} s, so nobody was killed")
            course.look(_there(run))
            bar.show(min(course.seconds, self._scene.limit_s), None)
            time.sleep(LOOK_S)

    def _fate(self, run: HostProcesses, planned: int, waited_s: float) -> Killed:
        statuses = run.statuses
        workers, batch = self._scene.workers, self._scene.batch
        attempts = [
            [step for path in run.traces[at * workers : (at + 1) * workers] for step in steps_of(path)]
            for at in range(ATTEMPTS)
        ]
        steps = [step for attempt in attempts for step in attempt]
        still_s = stood_still_s(attempts, VICTIM)
        finished = self._ended_well(statuses)
        return Killed(
            finished=finished,
            words="" if finished else run.last_words(next(iter(statuses))),
            went_on=still_s is not None,
            still_s=waited_s if still_s is None else still_s,
            ended=None not in statuses.values(),
            statuses=statuses,
            planned=planned,
            applied=applied(attempts, batch),
            computed=sum(step.samples for step in steps),
        )

    def _ended_well(self, statuses: dict[str, int | None]) -> bool:
        """Everybody but the host of the one that was killed, whose process may be that worker itself."""
        victim = list(self._scene.links_mbit)[VICTIM]
        return all(status == 0 for name, status in statuses.items() if name != victim)

    def _planned(self) -> int:
        """Samples in so many epochs."""
        samples = len(TASKS[self._scene.task].training(self._data))
        assert samples % (self._scene.batch * self._scene.workers) == 0, "all do the same, so no round is cut"
        return self._scene.epochs * samples


def _there(run: HostProcesses) -> list[Path]:
    return [path for path in run.traces if path.exists()]
