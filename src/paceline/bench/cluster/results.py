"""What runs of the benchmark of a small cluster gave, kept line by line, so that it can go on later."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.bench.cluster.course import Figures, Reached
from paceline.bench.cluster.scene import Scene
from paceline.bench.kept import keep, read_kept
from paceline.bench.rivals.killed import Killed


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


class Results:
    """Outcomes by job; with a file, those of it too, and new ones are added to it at once."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._outcomes: dict[Job, Outcome] = {}
        for outcome in [] if path is None else read_kept(path, Outcome):
            if not outcome.trouble:  # one that failed is made again
                self._outcomes[outcome.job] = outcome

    def __len__(self) -> int:
        return len(self._outcomes)

    def get(self, job: Job) -> Outcome | None:
        """What is known of a job, if only by one that has waited for more."""
        if job in self._outcomes:
            return self._outcomes[job]
        return next((outcome for known, outcome in self._outcomes.items() if known.serves(job)), None)

    def add(self, outcome: Outcome) -> None:
        """A run is over."""
        self._outcomes[outcome.job] = outcome
        if self._path is not None:
            keep(self._path, outcome)


def job_of(scene: Scene, title: str, lr: float, seed: int, simulated: bool, version: str) -> Job:
    """The run of an entry, by its title, in a scene."""
    return Job(scene.name, title, lr, seed, simulated, scene.setup(simulated), version, scene.targets)
