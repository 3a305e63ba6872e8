"""What runs of the benchmark of a small cluster gave, kept line by line, so that it can go on later."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline_bench.cluster.course import Figures, Reached
from paceline_bench.cluster.scene import Scene
from paceline_bench.kept import KeptOutcomes
from paceline_bench.rivals.killed import Killed


class Job(msgspec.Struct, frozen=True):
    """One run."""

    scene: str
    entry: str
    """Its title."""
    lr: float
    seed: int
    simulated: bool
    setup: str
    """The scene's fingerprint."""
    version: str
    """Of Paceline."""
    targets: tuple[float, ...]
    """The accuracies that were waited for."""

    @property
    def title(self) -> str:
        """Of the run, for who waits for it."""
        where = f"{self.scene}, simulated" if self.simulated else self.scene
        return f"{where}, {self.entry} @{self.lr:g}, seed {self.seed}"

    def words(self, scene: Scene, data: Path) -> list[str]:
        """What the body is told."""
        told: dict[str, object] = {"task": scene.task, "data": data, "batch": scene.batch}
        told |= {"every": scene.every, "warmup": scene.warmup, "tests": scene.tests, "epochs": scene.epochs}
        told |= {"limit": scene.limit_samples, "lr": self.lr, "seed": self.seed}
        told |= {"target": scene.targets[-1]} if scene.targets else {}
        return [word for name, value in told.items() for word in (f"--{name}", str(value))]

    def serves(self, other: Job) -> bool:
        """Whether this run tells all that another one would."""
        same = msgspec.structs.replace(self, targets=other.targets) == other
        return same and set(other.targets) <= set(self.targets)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run."""

    job: Job
    figures: Figures | None
    """None when nobody took a step."""
    took_s: float = 0.0
    """Real time."""
    slow_link_bytes: int = 0
    trouble: str = ""
    killed: Killed | None = None
    """What became of it when a worker was killed, where one was."""
    about: str = ""
    """Which version of a rival this was."""

    def to(self, target: float) -> Reached | None:
        """When it had an accuracy."""
        return None if self.figures is None else self.figures.to(target)


class Results(KeptOutcomes[Job, Outcome]):
    """Of all runs so far."""

    kind = Outcome

    def get(self, job: Job) -> Outcome | None:
        """What is known of a job, if only by one that has waited for more."""
        if (known := super().get(job)) is not None:
            return known
        return next((outcome for other, outcome in self._outcomes.items() if other.serves(job)), None)


def job_of(scene: Scene, title: str, lr: float, seed: int, simulated: bool, version: str) -> Job:
    """The run of an entry, by its title, in a scene."""
    return Job(scene.name, title, lr, seed, simulated, scene.setup(simulated), version, scene.targets)
