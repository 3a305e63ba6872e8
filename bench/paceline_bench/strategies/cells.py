"""The cells of the benchmark of strategies: model, workers, link, straggler; and which run by default."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

import msgspec

from paceline.errors import ConfigError
from paceline_bench.strategies.runs.models import MODELS
from paceline_bench.strategies.runs.request import Pause
from paceline_bench.wrapped import ddp

WORKERS = (1, 2, 4)
LINKS = ("native", "throttled")
STRAGGLERS = ("none", "x2", "paused")
REAL, MEMORY = "real", "memory"
WIDTHS = {"vgg": 16, "resnet": 24, "densenet": 12, "efficientnet": 16, "convnext": 24}
MEMORY_WIDTHS = {"vgg": 112, "resnet": 200, "densenet": 160, "efficientnet": 240, "convnext": 240}
Kind = Literal["emulated", "real", "memory"]
FOLDER = Path(__file__).parent


class Cell(msgspec.Struct, frozen=True):
    """Where every strategy runs once per seed."""

    model: str
    workers: int
    link: str = "native"
    straggler: str = "none"
    kind: Kind = "emulated"
    """`emulated`: every worker has a device that takes a known time; `real`: this machine's processors
    compute; `memory`: a wider model, a few steps, and nothing is timed."""

    @property
    def name(self) -> str:
        """`resnet-4-native-none`; `resnet-2-real` and `vgg-4-memory` have neither links nor stragglers."""
        where = f"{self.link}-{self.straggler}" if self.kind == "emulated" else self.kind
        return f"{self.model}-{self.workers}-{where}"

    @property
    def alone(self) -> Cell:
        """Where one worker trains alone what is trained here together."""
        return Cell(self.model, 1, kind=self.kind)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same in all cells."""

    batch: int = 64
    """Samples of all workers together in one iteration."""
    warm_up: int = 20
    """Iterations before those that count,"""
    iterations: int = 60
    """and those."""
    device_s: float = 0.16
    """What an emulated device takes for `batch` samples: a worker's share of them takes its share of that."""
    mbit: float = 100.0
    """Of every host's link, where links are throttled."""
    ddp_buckets: int = 4
    """Of about equal size, into which DDP cuts gradients on throttled links: about one per unit of a model,
    so that they leave while the device computes. Elsewhere it has torch's own, which is one for these
    models: there a call more costs more than it hides."""
    pause_s: float = 1.5
    """How long a paused worker stands still, once, in the first half of the run."""
    widths: dict[str, int] = msgspec.field(default_factory=lambda: dict(WIDTHS))
    memory_widths: dict[str, int] = msgspec.field(default_factory=lambda: dict(MEMORY_WIDTHS))
    """About 4 million parameters, so that they outweigh what a process needs anyway."""
    memory_batch: int = 8
    memory_steps: int = 4
    rates: tuple[float, ...] = (0.001, 0.0025, 0.01, 0.02, 0.05)
    """Learning rates of which every strategy takes its best. Stale gradients that nothing corrects want low
    ones, lockstep high ones."""

    @property
    def samples(self) -> int:
        """Of a run."""
        return self.batch * (self.warm_up + self.iterations)

    @property
    def fingerprint(self) -> str:
        """Changes with anything that a run depends on, and with the files that say how runs are made; the
        rate is a run's own. Of what lies elsewhere in Paceline it knows nothing."""
        course = msgspec.json.encode(msgspec.structs.replace(self, rates=()))
        return hashlib.sha256(course + sources(FOLDER)).hexdigest()[:12]

    def slow(self, cell: Cell) -> dict[int, float]:
        """Which rank is slower, and how many times: the last."""
        return {cell.workers - 1: 2.0} if cell.straggler == "x2" and cell.workers > 1 else {}

    def pause(self, cell: Cell) -> Pause | None:
        """The last rank, once it has warmed up."""
        if cell.straggler != "paused" or cell.workers == 1:
            return None
        return Pause(cell.workers - 1, self.warm_up + self.iterations // 4, self.pause_s)


@cache
def sources(folder: Path) -> bytes:
    """What is written in the files that say how runs are made."""
    alone = [folder / name for name in ("data.py", "roster.py", "server.py")]
    paths = [*alone, *sorted(folder.glob("runs/*.py"))]
    paths.append(Path(ddp.__file__))
    return b"".join(path.read_bytes() for path in paths)


QUICK = Setup(
    batch=16,
    warm_up=2,
    iterations=6,
    device_s=0.02,
    pause_s=0.2,
    widths=dict.fromkeys(MODELS, 8),
    memory_widths=dict.fromkeys(MODELS, 8),
    memory_steps=2,
    rates=(0.05,),
)
QUICK_CELLS = ("resnet-2-native-none", "vgg-2-memory")


def every_cell() -> list[Cell]:
    """The whole grid, the main model first."""
    models = ["resnet", *(name for name in MODELS if name != "resnet")]
    grid = [
        Cell(model, workers, link, straggler)
        for model, workers, link, straggler in product(models, reversed(WORKERS), LINKS, STRAGGLERS)
        if workers > 1 or (link, straggler) == ("native", "none")
    ]
    real = [Cell(model, workers, kind="real") for model in models for workers in (2, 4)]
    return [*grid, *real, *(Cell(model, workers, kind="memory") for model in models for workers in (2, 4))]


DEFAULT = (
    "resnet-4-native-*",
    "resnet-2-native-none",
    "*-4-native-none",
    "vgg-4-throttled-none",
    "resnet-2-real",
    "*-4-memory",
)
"""What runs if nobody says otherwise: all kinds of cells once, and all models where it is cheapest."""


def chosen_cells(patterns: Iterable[str], quick: bool = False) -> list[Cell]:
    """Cells whose names match one of the patterns, in the order of the grid; the main model's first."""
    wanted = tuple(patterns) or (QUICK_CELLS if quick else DEFAULT)
    every = every_cell()
    for pattern in wanted:
        if not any(fnmatchcase(cell.name, pattern) for cell in every):
            raise ConfigError(
                f"no cell is called {pattern!r}. A cell is MODEL-WORKERS-LINK-STRAGGLER with "
                f"{', '.join(MODELS)}; {', '.join(map(str, WORKERS))}; {', '.join(LINKS)}; "
                f"{', '.join(STRAGGLERS)}; or MODEL-WORKERS-{REAL} or -{MEMORY}. * stands for anything."
            )
    return [cell for cell in every if any(fnmatchcase(cell.name, pattern) for pattern in wanted)]


def left_out(cells: Iterable[Cell]) -> int:
    """How many cells of the grid do not run."""
    return len(set(every_cell()) - set(cells))
