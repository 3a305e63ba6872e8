"""The runs that the tables take: cells, then seeds, then all strategies in turn; known ones are not repeated.

Every strategy tries the same learning rates, with the first seed, and keeps the one with the best accuracy
everywhere. More seeds run where accuracy is looked at: wherever devices are emulated and links native.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from paceline.errors import RunError
from paceline.testbed import why_not
from paceline_bench.experiment import Experiment, Turn
from paceline_bench.harness.plan import Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.strategies.cells import Cell, Setup
from paceline_bench.strategies.data import ImageData
from paceline_bench.strategies.outcome import (
    MeasuredStrategy,
    StrategyJob,
    StrategyOutcome,
    StrategyResults,
    figures_of,
)
from paceline_bench.strategies.roster import STRATEGIES, Strategy
from paceline_bench.strategies.runs.bed import Bed
from paceline_bench.strategies.runs.places import Ran, run_here
from paceline_bench.strategies.runs.request import StrategyRequest

Place = Callable[[Strategy, StrategyRequest], Ran]
StrategyTurn = Turn[StrategyJob, Strategy, StrategyOutcome]


class StrategySeries(msgspec.Struct, frozen=True, kw_only=True):
    """All that is to be run."""

    cells: list[Cell]
    strategies: list[Strategy]
    seeds: tuple[int, ...]
    setup: Setup
    data: str
    version: str

    def job(self, cell: Cell, strategy: Strategy, lr: float, seed: int) -> StrategyJob:
        """The run of a strategy in a cell; one that is alone runs once for all cells of its model."""
        place = cell.alone if strategy.name == "single" else cell
        return StrategyJob(
            place.name, strategy.name, lr, seed, self.data, self.setup.fingerprint, self.version
        )

    @property
    def reference(self) -> Cell | None:
        """Where rates are tried: the first cell's model and workers, on this machine, nobody slow."""
        timed = [cell for cell in self.cells if cell.kind != "memory"]
        return Cell(timed[0].model, timed[0].workers) if timed else None

    def tried(self, strategy: Strategy) -> list[StrategyJob]:
        """With every learning rate; none where there is nothing to choose."""
        if self.reference is None or len(self.setup.rates) == 1 or strategy.rate_of:
            return []
        return [self.job(self.reference, strategy, lr, self.seeds[0]) for lr in self.setup.rates]

    def lr(self, strategy: Strategy, results: StrategyResults) -> float:
        """The one that got furthest; the first of equals, and as long as nothing is known."""
        strategy = STRATEGIES[strategy.rate_of] if strategy.rate_of else strategy
        known = [(job.lr, results.get(job)) for job in self.tried(strategy)]
        scores = {lr: out.figures.accuracy or 0.0 for lr, out in known if out is not None and out.figures}
        return max(scores, key=lambda lr: scores[lr]) if scores else self.setup.rates[0]

    def seeds_of(self, cell: Cell) -> tuple[int, ...]:
        """Several where accuracy is compared."""
        several = cell.kind == "emulated" and cell.link == "native"
        return self.seeds if several else self.seeds[:1]

    def passes(self, cell: Cell) -> list[tuple[int, list[Strategy]]]:
        """Seed after seed, everybody in turn."""
        here = [each for each in self.strategies if each.takes(cell)]
        return [(seed, here) for seed in self.seeds_of(cell)]

    def measured(self, cell: Cell, strategy: Strategy, results: StrategyResults) -> MeasuredStrategy:
        """What is known of a strategy in a cell."""
        lr = self.lr(strategy, results)
        found = [results.get(self.job(cell, strategy, lr, seed)) for seed in self.seeds_of(cell)]
        outcomes = [outcome for outcome in found if outcome is not None]
        return MeasuredStrategy(
            cell=cell,
            strategy=strategy,
            lr=lr,
            figures=[each.figures for each in outcomes if each.figures is not None],
            tried=tuple(job.lr for job in self.tried(strategy)),
            trouble="; ".join(dict.fromkeys(each.trouble for each in outcomes if each.trouble)),
            diverged=sum(each.diverged for each in outcomes),
        )

    @property
    def total(self) -> int:
        """How many runs it takes, known ones included."""
        rates = {job for strategy in self.strategies for job in self.tried(strategy)}
        tried = sum(not strategy.rate_of for strategy in self.strategies)
        known = sum(cell == self.reference for cell in self.cells) * tried if rates else 0
        jobs = {
            self.job(cell, strategy, 0.0, seed)
            for cell in self.cells
            for seed, here in self.passes(cell)
            for strategy in here
        }
        return len(jobs) + len(rates) - known


class Runner:
    """Carries the runs out, one after the other."""

    def __init__(self, series: StrategySeries, data: ImageData, results: StrategyResults, say: Say) -> None:
        self._series, self._data, self._results, self._say = series, data, results, say

    def experiment(
        self, rows: Callable[[], list[BenchRow]]
    ) -> Experiment[StrategyJob, Strategy, StrategyOutcome]:
        """All of them, cell after cell."""
        return Experiment("strategies", self._results, lambda: self._series.total, self._turns, told, rows)

    def _turns(self, folder: Path) -> Iterator[StrategyTurn]:
        series = self._series
        trying = [each for each in series.strategies if not each.rate_of]
        tried = zip(*map(series.tried, trying), strict=True)
        if series.reference is not None:
            rates = [pair for jobs in tried for pair in zip(jobs, trying, strict=True)]
            yield Turn(rates, partial(self._opened, series.reference, folder))
        for cell in series.cells:
            if cell.link == "throttled" and (reason := why_not()) is not None:
                self._say(f"strategies, {cell.name}: skipped, because {reason}")
                continue
            passes = [(seed, strategy) for seed, here in series.passes(cell) for strategy in here]
            jobs = [
                (series.job(cell, strategy, series.lr(strategy, self._results), seed), strategy)
                for seed, strategy in passes
            ]
            yield Turn(jobs, partial(self._opened, cell, folder))

    @contextmanager
    def _opened(
        self, cell: Cell, folder: Path
    ) -> Iterator[Callable[[StrategyJob, Strategy, str], StrategyOutcome]]:
        """Hosts of a testbed where links are throttled; who trains alone is on this machine anyway."""

        def run(place: Place, job: StrategyJob, strategy: Strategy, title: str) -> StrategyOutcome:
            alone = strategy.name == "single"
            return self._run(
                job, cell.alone if alone else cell, strategy, run_here if alone else place, folder
            )

        if cell.link != "throttled":
            yield partial(run, run_here)
            return
        bed = Bed(cell.workers, self._series.setup.mbit)
        try:
            yield partial(run, bed.run)
        finally:
            bed.down()

    def _run(
        self, job: StrategyJob, cell: Cell, strategy: Strategy, place: Place, folder: Path
    ) -> StrategyOutcome:
        began = time.monotonic()
        request = self._request(job, cell, folder)
        try:
            ran = place(strategy, request)
            accuracy = None
            if cell.kind != "memory":
                accuracy = self._data.accuracy(ran.weights, cell.model, request.width)
            figures = figures_of(ran, strategy, cell, self._series.setup, accuracy)
        except RunError as error:  # one that fails does not end the others
            return StrategyOutcome(job=job, trouble=str(error).strip().splitlines()[-1])
        return StrategyOutcome(job=job, figures=figures, took_s=time.monotonic() - began)

    def _request(self, job: StrategyJob, cell: Cell, folder: Path) -> StrategyRequest:
        setup = self._series.setup
        memory = cell.kind == "memory"
        batch = setup.memory_batch * cell.workers if memory else setup.batch
        samples = batch * setup.memory_steps if memory else setup.samples
        return StrategyRequest(
            folder=tempfile.mkdtemp(dir=folder),
            data=str(self._data.in_order(samples, job.seed, folder)),
            model=cell.model,
            width=(setup.memory_widths if memory else setup.widths)[cell.model],
            batch=batch // cell.workers,
            lr=job.lr,
            seed=job.seed,
            workers=cell.workers,
            device_s=setup.device_s if cell.kind == "emulated" else None,
            of=setup.batch,
            slow=setup.slow(cell),
            ddp_buckets=setup.ddp_buckets if cell.link == "throttled" else None,
            pause=setup.pause(cell),
        )


def told(outcome: StrategyOutcome) -> str:
    """A run in one line."""
    figures = outcome.figures
    if figures is None:
        return f"did not run: {outcome.trouble}"
    said = "" if figures.accuracy is None else f", accuracy {100 * figures.accuracy:.1f} %"
    return f"{figures.samples_per_s:.0f} samples/s{said}"
