"""What recipes with real gradients are made of: sides that train, and the course that each has taken.

A trial is data: a cluster, the work, and the sides that are compared. What its figures are is a function of
the courses of one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from math import inf, isfinite, prod
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec

from paceline_bench.harness.plan import BenchPlan

SMOOTHED = 3
"""Accuracy is the mean of so many measurements in a row."""
CHANCE = 0.1
"""What a model that diverged has right, of ten classes."""
QUICK = ("--images=64", "--epochs=1", "--batch=8", "--every=1", "--lr=0.01", "--seed=0")


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train; what is left out is the trial's."""

    protocol: str
    settings: dict[str, Any] = {}
    weighting: Literal["mean", "sum"] = "mean"
    """Whether a push that is applied alone counts 1/workers of a step, or a whole one."""
    schedule: Literal["samples", "updates"] = "samples"
    """What a falling learning rate counts."""
    lr: float | None = None
    momentum: float | None = None
    epochs: int | None = None
    workers: int | None = None
    batch: int | None = None


class SplitSide(Side, frozen=True, kw_only=True):
    """A model that is split over a mesh: in real processes, whose times mean nothing."""

    mesh: dict[str, int]
    args: tuple[str, ...] = ()


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all sides."""

    cluster: str
    """The text of a cluster file; `{workers}` in it is the number of workers."""
    workers: int
    sides: dict[str, Side]
    lr: float
    rates: tuple[float, ...] = ()
    """Learning rates that every side tries with the first seed; what ends best is kept. None: `lr`."""
    epochs: int
    batch: int = 16
    every: int = 5
    """Steps of rank 0 from one measurement to the next."""
    momentum: float = 0.9
    noise: float = 0.3
    adamw: bool = False
    falls: bool = False
    """Whether the learning rate falls to a tenth after two thirds of the work, and again later."""
    seeds: int = 3
    images: int = 20_000
    """Of CIFAR-10, where it is trained on (`--data`); the rest of the recipe stays as it is."""
    image_epochs: int = 3
    """There; a side with epochs of its own has more or fewer in the same proportion."""

    def epochs_of(self, side: Side, on_images: bool) -> int:
        """Of the digits, or of CIFAR-10."""
        own = side.epochs or self.epochs
        return max(1, round(self.image_epochs * own / self.epochs)) if on_images else own

    def work(self, side: Side, seed: int, plan: BenchPlan, lr: float | None = None) -> TrialRun:
        """One run. A quick one only shows that the protocol trains."""
        if isinstance(side, SplitSide):
            return self._split_work(side, seed, plan)
        if plan.quick:
            return TrialRun(
                side=Side(protocol=side.protocol), workers=2, cluster="workers = 2", args=QUICK, seed=seed
            )
        workers = side.workers or self.workers
        words: dict[str, object] = {"batch": side.batch or self.batch, "every": self.every}
        words |= {
            "lr": lr or side.lr or self.lr,
            "noise": self.noise,
            "seed": seed,
            "epochs": self.epochs_of(side, plan.data is not None),
        }
        words["momentum"] = self.momentum if side.momentum is None else side.momentum
        if plan.data is not None:
            words |= {"data": Path(plan.data).resolve(), "images": self.images}
        flags = [f"--{name}" for name in ("adamw", "falls") if getattr(self, name)]
        args = [str(each) for name, value in words.items() for each in (f"--{name}", value)]
        cluster = self.cluster.replace("{workers}", str(workers))
        return TrialRun(side=side, workers=workers, cluster=cluster, args=(*args, *flags), seed=seed)

    def _split_work(self, side: SplitSide, seed: int, plan: BenchPlan) -> TrialRun:
        """On digits or clicks, whatever else is there; a quick one has two workers."""
        images, epochs = (64, 1) if plan.quick else (self.images, side.epochs or self.epochs)
        if plan.quick:
            mesh = dict.fromkeys(side.mesh, 1) | {[*side.mesh][-1]: 2}
            side = msgspec.structs.replace(side, mesh=mesh, args=side.args[:1])
        words: dict[str, float] = {
            "images": images,
            "epochs": epochs,
            "batch": 8 if plan.quick else self.batch,
            "seed": seed,
        }
        words |= {"lr": side.lr or self.lr, "momentum": self.momentum, "noise": self.noise}
        args = tuple(f"--{name}={value}" for name, value in words.items())
        return TrialRun(
            side=side, workers=prod(side.mesh.values()), cluster="", args=(*args, *side.args), seed=seed
        )


class TrialRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run, all told."""

    side: Side
    workers: int
    cluster: str
    args: tuple[str, ...]
    seed: int

    @property
    def key(self) -> str:
        """The same for the same run."""
        return sha256(msgspec.json.encode(self)).hexdigest()[:16]


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """How one run went, in virtual time."""

    seen: list[tuple[float, int, float]]
    """When, after how many samples, with which accuracy."""
    seconds: float
    """Until the last sample."""
    samples: int
    sent_bytes: int = 0
    lssr: float | None = None
    told: dict[str, float] = {}
    """The last that workers reported, by name."""
    diverged: bool = False

    @property
    def smoothed(self) -> list[tuple[float, int, float]]:
        """Each with those before it."""
        accuracies = [accuracy for *_, accuracy in self.seen]
        return [
            (t, samples, fmean(accuracies[max(0, at - SMOOTHED + 1) : at + 1]))
            for at, (t, samples, _) in enumerate(self.seen)
        ]

    @property
    def final(self) -> float:
        """Accuracy in the end."""
        return CHANCE if self.diverged or not self.seen else self.smoothed[-1][2]

    @property
    def best(self) -> float:
        """The highest of all."""
        return max((accuracy for *_, accuracy in self.smoothed), default=CHANCE)

    def to(self, accuracy: float) -> float:
        """Seconds to an accuracy; infinite if it was never reached."""
        return next((t for t, _, seen in self.smoothed if seen >= accuracy), inf)

    def samples_to(self, accuracy: float) -> float:
        """Samples to an accuracy."""
        return next((samples for _, samples, seen in self.smoothed if seen >= accuracy), inf)

    def at(self, seconds: float) -> float:
        """Accuracy at a time."""
        return [CHANCE, *(accuracy for t, _, accuracy in self.smoothed if t <= seconds)][-1]

    def mean_until(self, seconds: float) -> float:
        """Accuracy averaged over time, from the first second to this one."""
        steps = [(0.0, CHANCE), *((t, accuracy) for t, _, accuracy in self.seen if t < seconds)]
        ends = [t for t, _ in steps[1:]] + [seconds]
        return sum((end - t) * seen for (t, seen), end in zip(steps, ends, strict=True)) / seconds


Courses = Mapping[str, Course]
Judged = Callable[[Courses], dict[str, float]]


def sooner(theirs: Course, ours: Course, accuracy: float) -> float:
    """How many times sooner ours has an accuracy."""
    return times(theirs.to(accuracy), ours.to(accuracy))


def times(theirs: float, ours: float) -> float:
    """How many times as much theirs takes: 0 if ours never gets there, infinite if only theirs never does.

    When theirs gave up says how long it was given, and nothing about how long it would take.
    """
    return theirs / ours if isfinite(ours) else 0.0


def points(ours: float, theirs: float) -> float:
    """A difference of accuracies, in points."""
    return 100 * (ours - theirs)
