"""What became of a run of the benchmark of strategies: figures from what its workers tell."""

from __future__ import annotations

from statistics import fmean, median

import msgspec

from paceline.errors import RunError
from paceline.trace import Result, read_trace, tally
from paceline.trace.events import Decided
from paceline.trace.tally import StalenessSummary
from paceline_bench.harness.stats import Spread, spread
from paceline_bench.kept import KeptOutcomes
from paceline_bench.strategies.cells import Cell, Setup
from paceline_bench.strategies.roster import Strategy
from paceline_bench.strategies.runs.models import CLASSES
from paceline_bench.strategies.runs.places import Ran
from paceline_bench.strategies.runs.request import Answer
from paceline_bench.strategies.waits import Waits, waits_of

DIVERGED = "NaN or infinity"
"""What the trouble of a run says that diverged, whoever noticed it."""
CHANCE = 1 / CLASSES
"""What the accuracy of a run that diverged counts as."""


class StrategyJob(msgspec.Struct, frozen=True):
    """One run."""

    cell: str
    strategy: str
    lr: float
    seed: int
    data: str
    setup: str
    """Its fingerprint."""
    version: str
    """Of Paceline."""

    @property
    def title(self) -> str:
        """Of the run, for who waits for it."""
        return f"{self.cell}, {self.strategy} @{self.lr:g}, seed {self.seed}"


class StrategyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    samples_per_s: float
    """After warming up; only samples that went into the model."""
    total_s: float
    """From the first batch to the last step, warming up included."""
    iteration: Spread
    """Seconds from step to step of one worker, after warming up."""
    accuracy: float | None
    """Of the last weights, on the test samples."""
    loss: float
    """Mean of the last tenth of all iterations."""
    losses: list[float]
    """Means of ten parts of the run, in the order in which iterations ended."""
    late: float
    held_bytes: list[int]
    """Per rank."""
    peak_bytes: list[int]
    wire_bytes: int | None = None
    staleness: StalenessSummary | None = None
    waits: Waits | None = None
    applied: float = 1.0
    """Share of the gradients that were not dropped."""
    last_steps: int | None = None
    """How many steps the last rank made, warming up included; None in results of earlier versions."""
    shared_bytes: int = 0
    """What the first rank's memory has in common with the server's."""
    server_bytes: int | None = None
    """Peak of the parameter server's process; None: there is none here, or nobody looked."""

    @property
    def first_host_bytes(self) -> int | None:
        """Of the server and the first worker beside it; what they have in common counts once."""
        if self.server_bytes is None:
            return None
        return self.peak_bytes[0] + self.server_bytes - self.shared_bytes


class StrategyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A job, and what became of it."""

    job: StrategyJob
    figures: StrategyFigures | None = None
    trouble: str = ""
    took_s: float = 0.0

    @property
    def diverged(self) -> bool:
        """Whether it came to no end because numbers did not stay finite."""
        return DIVERGED in self.trouble


def figures_of(
    ran: Ran, strategy: Strategy, cell: Cell, setup: Setup, accuracy: float | None
) -> StrategyFigures:
    """From the answers of all ranks, and the trace where there is one."""
    events = [] if ran.trace is None else list(read_trace(ran.trace))
    result: Result | None = tally(events).result() if events else None
    pushes = [event for event in events if isinstance(event, Decided) and event.pushed is not None]
    applied = 1 - sum(event.fate == "drop" for event in pushes) / len(pushes) if pushes else 1.0
    check_losses(ran.answers)
    warm_up = 0 if cell.kind == "memory" else setup.warm_up * setup.batch
    losses = in_parts(ran.answers, 10)
    return StrategyFigures(
        samples_per_s=applied * rate(ran.answers, warm_up),
        total_s=max(a.ends[-1] for a in ran.answers) - min(a.began for a in ran.answers),
        iteration=spread(gaps(ran.answers, warm_up)),
        accuracy=accuracy,
        loss=losses[-1],
        losses=losses,
        late=fmean(answer.late for answer in ran.answers),
        held_bytes=[answer.held_bytes for answer in ran.answers],
        peak_bytes=[answer.peak_bytes for answer in ran.answers],
        wire_bytes=ran.wire_bytes,
        staleness=None if result is None else result.staleness,
        waits=waits_of(events, int(strategy.settings["resync"])) if "resync" in strategy.settings else None,
        applied=applied,
        last_steps=len(ran.answers[-1].ends),
        shared_bytes=ran.answers[0].shared_bytes,
        server_bytes=ran.answers[0].server_bytes,
    )


def check_losses(answers: list[Answer]) -> None:
    """A loss that is no number is no result."""
    for answer in answers:
        if None in answer.losses:
            at = answer.losses.index(None) + 1
            raise RunError(f"rank {answer.rank} had a loss of {DIVERGED} in its iteration {at}: it diverged")


def rate(answers: list[Answer], warm_up: int) -> float:
    """Samples per second of all workers, from when so many samples were done to the end."""
    steps = _steps(answers)
    start = _warm(steps, warm_up)
    done = sum(samples for t, samples in steps if t > start)
    if not done:
        raise RunError("it ended before it had warmed up, so there is nothing to time")
    return done / (steps[-1][0] - start)


def gaps(answers: list[Answer], warm_up: int) -> list[float]:
    """From step to step of the same worker, after warming up."""
    start = _warm(_steps(answers), warm_up)
    pairs = [pair for answer in answers for pair in zip(answer.ends, answer.ends[1:], strict=False)]
    return [later - sooner for sooner, later in pairs if sooner >= start] or [b - a for a, b in pairs]


def in_parts(answers: list[Answer], parts: int) -> list[float]:
    """Mean losses of equal parts of all iterations, in the order of their ends."""
    pairs = (pair for answer in answers for pair in zip(answer.ends, answer.losses, strict=True))
    losses = [loss for _, loss in sorted(pairs) if loss is not None]
    size = max(1, len(losses) // parts)
    return [fmean(losses[at : at + size]) for at in range(0, size * parts, size) if losses[at : at + size]]


def _steps(answers: list[Answer]) -> list[tuple[float, int]]:
    return sorted(step for answer in answers for step in zip(answer.ends, answer.samples, strict=True))


def _warm(steps: list[tuple[float, int]], warm_up: int) -> float:
    """When so many samples were done."""
    done = 0
    for t, samples in steps:
        done += samples
        if done >= warm_up:
            return t
    return steps[-1][0]


class StrategyResults(KeptOutcomes[StrategyJob, StrategyOutcome]):
    """Of all runs so far."""

    kind = StrategyOutcome


class MeasuredStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy in a cell: all its seeds."""

    cell: Cell
    strategy: Strategy
    lr: float
    figures: list[StrategyFigures]
    tried: tuple[float, ...] = ()
    """The learning rates of which this is the best."""
    trouble: str = ""
    diverged: int = 0
    """How many more seeds diverged."""

    @property
    def speeds(self) -> list[float]:
        """Samples per second, per seed."""
        return [each.samples_per_s for each in self.figures]

    @property
    def samples_per_s(self) -> float | None:
        """The median."""
        return median(self.speeds) if self.figures else None

    @property
    def accuracies(self) -> list[float]:
        """Per seed; a run that diverged is as good as chance."""
        ended = [each.accuracy for each in self.figures if each.accuracy is not None]
        return ended + [CHANCE] * self.diverged

    @property
    def accuracy(self) -> float | None:
        """The median."""
        return median(self.accuracies) if self.accuracies else None
