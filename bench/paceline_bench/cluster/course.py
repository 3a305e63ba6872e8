"""How a run of the benchmark of a small cluster goes: read from its traces, its copies of weights measured.

All sides write the same events, so one definition of every figure serves all. The clock begins
with the first iteration of the first worker: starting processes and importing torch count for nobody.
In virtual time the run has measured its weights itself, and there is nothing to measure here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import msgspec
import torch
from safetensors.torch import load_file

from paceline.corrections import NONE
from paceline.trace import TraceTail
from paceline.trace.events import AnyEvent, Decided, Evaluated, RunStarted, WorkerLeft
from paceline_bench.cluster.scene import Scene
from paceline_bench.cluster.script import SMOOTHED, copy_of
from paceline_bench.cluster.tasks import TASKS

LATE = 1.1
"""A compute time of so many times the emulated one means that the emulation did not hold."""

WARM = 3
"""Pushes of a worker after which its pace is counted."""

Judge = Callable[[Path], float]


class Reached(msgspec.Struct, frozen=True):
    """When a run had an accuracy."""

    target: float
    seconds: float
    """When the copy was taken with which it was reached,"""
    samples: int
    """and after how many samples."""


class Figures(msgspec.Struct, frozen=True):
    """What is known of a run so far."""

    seconds: float
    """Since the first iteration began."""
    samples_per_s: float
    """Of samples that went into the model: dropped gradients do not count."""
    waiting: float
    """Of all workers' time, the share in which their devices did not compute."""
    accuracy: float | None
    """The last."""
    best: float | None
    reached: tuple[Reached, ...]
    """The accuracies asked for, as far as they were reached."""
    late: float
    """Share of iterations whose real compute took longer than the emulated device allows."""
    ranks: frozenset[int]
    """Who took part."""
    lost: tuple[str, ...] = ()
    """Workers that did not stay."""
    correct: str = NONE
    """What was done about stale gradients."""
    steady_per_s: float = 0.0
    """Samples/s without the beginning: every worker's own, from its third push to its last within the limit,
    added up. So it makes no difference where in a round the time was up."""

    def to(self, target: float) -> Reached | None:
        """When an accuracy was reached."""
        return next((each for each in self.reached if each.target == target), None)


class _Pace:
    """One worker's pushes, once it is warm."""

    def __init__(self) -> None:
        self.pushes, self.samples, self.first, self.last = 0, 0, 0.0, 0.0

    def push(self, t: float, samples: int) -> None:
        """One more."""
        self.pushes += 1
        if self.pushes <= WARM:
            self.first = t
        else:
            self.samples += samples
        self.last = t

    @property
    def per_s(self) -> float:
        """Samples."""
        return self.samples / (self.last - self.first) if self.last > self.first else 0.0


class AccuracyCourse:
    """Follows the traces of a run."""

    def __init__(self, scene: Scene, copies: Path, judge: Judge, limit_s: float | None = None) -> None:
        self._scene, self._copies, self._judge = scene, copies, judge
        self._limit_s = scene.limit_s if limit_s is None else limit_s
        self._tails: dict[Path, TraceTail] = {}
        self._began, self._now = math.inf, -math.inf
        self._samples, self._compute_s, self._pushes, self._late = 0, 0.0, 0, 0
        self._ranks: set[int] = set()
        self._paces: dict[int, _Pace] = {}
        self._latest: deque[float] = deque(maxlen=SMOOTHED)
        self._judged: list[tuple[float, int, float]] = []
        self._lost: list[str] = []
        self._correct = NONE

    def look(self, traces: list[Path]) -> None:
        """Take whatever is new in these files."""
        for path in traces:
            tail = self._tails.setdefault(path, TraceTail(path))
            for event in tail.new_events():
                self._take(event)

    @property
    def seconds(self) -> float:
        """Since the first iteration; 0 before it."""
        return max(0.0, self._now - self._began)

    @property
    def samples(self) -> int:
        """That went into the model."""
        return self._samples

    @property
    def best(self) -> float | None:
        """The best accuracy so far."""
        return max((accuracy for _, _, accuracy in self._judged), default=None)

    @property
    def is_over(self) -> bool:
        """Whether the last target was reached."""
        targets, best = self._scene.targets, self.best
        return bool(targets) and best is not None and best >= targets[-1]

    def figures(self, final: float | None = None) -> Figures:
        """All of it, of a run in which somebody has taken a step; `final`: how good its last weights are."""
        seconds, team = self.seconds, max(len(self._ranks), 1)
        last = self._judged[-1][2] if self._judged else None
        return Figures(
            seconds=seconds,
            samples_per_s=self._samples / seconds,
            waiting=1.0 - self._compute_s / (team * seconds),
            accuracy=last if final is None else final,
            best=self.best,
            reached=tuple(each for target in self._scene.targets for each in self._reached(target)),
            late=self._late / self._pushes,
            ranks=frozenset(self._ranks),
            lost=tuple(self._lost),
            correct=self._correct,
            steady_per_s=sum(pace.per_s for pace in self._paces.values()),
        )

    def _reached(self, target: float) -> list[Reached]:
        found = (Reached(target, t - self._began, n) for t, n, share in self._judged if share >= target)
        return [each for each in [next(found, None)] if each is not None]

    def _take(self, event: AnyEvent) -> None:
        match event:
            case RunStarted():
                self._correct = event.correct
            case Decided(pushed=int()):
                self._pushed(event)
            case Evaluated():
                self._judge_copy(event)
            case WorkerLeft(reason="died" | "failed"):
                self._lost.append(f"rank {event.worker} {event.reason}: {event.detail}")

    def _pushed(self, event: Decided) -> None:
        assert event.pushed is not None
        first = event.pushed not in self._ranks  # it warms up
        self._ranks.add(event.pushed)
        self._began = min(self._began, event.t - event.compute_s)
        self._now = max(self._now, event.t)
        used = event.samples if event.fate != "drop" else 0
        self._samples += used
        if event.t - self._began <= self._scene.limit_s:
            self._paces.setdefault(event.pushed, _Pace()).push(event.t, used)
        self._compute_s += event.compute_s
        self._pushes += 1
        self._late += not first and event.compute_s > LATE * self._scene.takes_s(event.pushed, event.samples)

    def _judge_copy(self, event: Evaluated) -> None:
        """What comes after the last target, or after the limit, is not looked at any more."""
        if self.is_over or event.t - self._began > self._limit_s:
            return
        self._latest.append(self._accuracy(event))
        if len(self._latest) == SMOOTHED:
            self._judged.append((event.t, event.samples, fmean(self._latest)))

    def _accuracy(self, event: Evaluated) -> float:
        if "copy" not in event.values:
            return event.values["accuracy"]
        path = copy_of(self._copies, int(event.values["copy"]))
        accuracy = self._judge(path)
        path.unlink()
        return accuracy


def judge_of(scene: Scene, data: Path) -> Judge:
    """Measures copies on the first test samples, in this process, on one core at a time."""
    task = TASKS[scene.task]
    measure, model = task.measure(data, scene.tests), task.model(0).eval()

    def judge(path: Path) -> float:
        model.load_state_dict(load_file(path))
        with one_thread():
            return measure(model)

    return judge


@contextmanager
def one_thread() -> Iterator[None]:
    """Leave the other cores to the runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
