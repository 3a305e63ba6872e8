"""How a run of the benchmark of a small cluster goes: read from its traces, its copies of weights measured.

Both sides write the same events, so one definition of every figure serves both. The clock begins
with the first iteration of the first worker: starting processes and importing torch count for nobody.
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

from paceline.bench.cluster.cifar import test_set
from paceline.bench.cluster.scene import Scene
from paceline.bench.cluster.script import copy_of, network
from paceline.trace import TraceTail
from paceline.trace.events import AnyEvent, Decided, Evaluated, WorkerLeft

LATE = 1.1
"""A compute time of so many times the emulated one means that the emulation did not hold."""

SMOOTHED = 3
"""Accuracy is the mean of so many copies, one after the other: a single one is up or down two points."""

Judge = Callable[[Path], float]


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
    reached_s: float | None
    """When the copy was taken with which the accuracy asked for was reached."""
    late: float
    """Share of iterations whose real compute took longer than the emulated device allows."""
    ranks: frozenset[int]
    """Who took part."""
    lost: tuple[str, ...] = ()
    """Workers that did not stay."""


class AccuracyCourse:
    """Follows the traces of a run."""

    def __init__(self, scene: Scene, copies: Path, judge: Judge) -> None:
        self._scene, self._copies, self._judge = scene, copies, judge
        self._tails: dict[Path, TraceTail] = {}
        self._began, self._now = math.inf, -math.inf
        self._samples, self._compute_s, self._pushes, self._late = 0, 0.0, 0, 0
        self._ranks: set[int] = set()
        self._latest: deque[float] = deque(maxlen=SMOOTHED)
        self._judged: list[tuple[float, float]] = []
        self._lost: list[str] = []

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
    def best(self) -> float | None:
        """The best accuracy so far."""
        return max((accuracy for _, accuracy in self._judged), default=None)

    @property
    def reached_s(self) -> float | None:
        """When the target was reached."""
        times = (t - self._began for t, accuracy in self._judged if accuracy >= self._scene.target)
        return next(times, None)

    def figures(self) -> Figures:
        """All of it; of a run in which somebody has taken a step."""
        seconds, team = self.seconds, max(len(self._ranks), 1)
        return Figures(
            seconds=seconds,
            samples_per_s=self._samples / seconds,
            waiting=1.0 - self._compute_s / (team * seconds),
            accuracy=self._judged[-1][1] if self._judged else None,
            best=self.best,
            reached_s=self.reached_s,
            late=self._late / self._pushes,
            ranks=frozenset(self._ranks),
            lost=tuple(self._lost),
        )

    def _take(self, event: AnyEvent) -> None:
        match event:
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
        self._samples += event.samples if event.fate != "drop" else 0
        self._compute_s += event.compute_s
        self._pushes += 1
        self._late += not first and event.compute_s > LATE * self._scene.takes_s(event.pushed, event.samples)

    def _judge_copy(self, event: Evaluated) -> None:
        """What comes after the target, or after the limit, is not looked at any more."""
        if self.reached_s is not None or event.t - self._began > self._scene.limit_s:
            return
        path = copy_of(self._copies, int(event.values["copy"]))
        self._latest.append(self._judge(path))
        path.unlink()
        if len(self._latest) == SMOOTHED:
            self._judged.append((event.t, fmean(self._latest)))


def judge_of(data: Path, images: int) -> Judge:
    """Measures copies on the first images of the test set, in this process, on one core at a time."""
    pixels, classes = test_set(data, images)
    model = network(0).eval()

    def judge(path: Path) -> float:
        model.load_state_dict(load_file(path))
        with torch.no_grad(), one_thread():
            return float((model(pixels).argmax(1) == classes).float().mean())

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
