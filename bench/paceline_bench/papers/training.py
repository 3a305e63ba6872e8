"""Carries out what recipes want to have trained: exact simulation, real gradients in virtual time.

Every run is kept as soon as it is over, so that a long recipe can be interrupted. The load of the machine
does not matter for what is found, only for how long it takes.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import TracebackType

import msgspec
from safetensors.torch import save_file

import paceline
from paceline.config import RunConfig
from paceline.errors import RunError
from paceline.trace import read_trace, tally
from paceline.trace.events import Evaluated, Reported
from paceline_bench.exact import ExactRuns, trouble, virtual
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.kept import keep
from paceline_bench.papers import body
from paceline_bench.papers.trial import Course, Judged, Side, SplitSide, Trial, TrialRun

SAID_EVERY_S = 15.0
PATIENCE_S = 900.0
"""One run takes seconds; longer than this is a fault."""
SPLIT_BODY = Path(__file__).with_name("split_body.py")
NOT_FINITE = "not finite"
"""What a run that diverged says of its gradient."""

Values = dict[str, list[float]]


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    """One run, as it is kept."""

    key: str
    version: str
    course: Course


class TrialTrainer:
    """Runs one after another, in processes that one zygote forks."""

    def __init__(self, plan: BenchPlan, say: Say, known: list[Trained] | None = None) -> None:
        self._plan, self._say = plan, say
        self._known = {each.key: each.course for each in known or [] if each.version == paceline.__version__}
        self._runs = ExactRuns(body.__file__)
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-papers-")
        self._number = 0

    def __enter__(self) -> TrialTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runs.close()
        self._folder.cleanup()

    def values(self, trial: Trial, judged: Judged) -> Values:
        """The figures of a trial, one value for each seed."""
        first, count = self._plan.seed, 1 if self._plan.quick else trial.seeds
        rates = {name: self._best_rate(trial, name, side) for name, side in trial.sides.items()}
        todo = [
            (seed, name, trial.work(side, seed, self._plan, rates[name]))
            for seed in range(first, first + count)
            for name, side in trial.sides.items()
        ]
        courses = self._courses(todo)
        values: Values = {}
        for seed in sorted(courses):
            for figure, value in judged(courses[seed]).items():
                values.setdefault(figure, []).append(value)
        return values

    def _best_rate(self, trial: Trial, name: str, side: Side) -> float | None:
        """What ends with the highest accuracy, with the first seed."""
        if self._plan.quick or side.lr is not None or not trial.rates:
            return None
        finals = {
            rate: self.course(trial.work(side, self._plan.seed, self._plan, rate)).final
            for rate in trial.rates
        }
        best = max(finals, key=lambda rate: finals[rate])
        self._say(f"  {name}: rate {best:g}, of {', '.join(f'{rate:g}' for rate in finals)}")
        return best

    def _courses(self, todo: list[tuple[int, str, TrialRun]]) -> dict[int, dict[str, Course]]:
        """All of them, with the time left every now and then."""
        courses: dict[int, dict[str, Course]] = {}
        began, said, new = time.monotonic(), time.monotonic(), 0
        for number, (seed, name, work) in enumerate(todo):
            if time.monotonic() - said > SAID_EVERY_S and new:
                said = time.monotonic()
                left_s = (said - began) / new * sum(each.key not in self._known for *_, each in todo[number:])
                self._say(
                    f"  run {number + 1} of {len(todo)}: {name}, seed {seed}; about {left_s:.0f} s left"
                )
            new += work.key not in self._known
            courses.setdefault(seed, {})[name] = self.course(work)
        return courses

    def course(self, work: TrialRun) -> Course:
        """What is known of a run, or what it gives."""
        if work.key not in self._known:
            self._known[work.key] = self._run(work)
            if self._plan.results is not None:
                keep(Path(self._plan.results), Trained(work.key, paceline.__version__, self._known[work.key]))
        return self._known[work.key]

    def _run(self, work: TrialRun) -> Course:
        self._number += 1
        folder = Path(self._folder.name) / f"run-{self._number}"
        folder.mkdir()
        config = self._with_digits(_config(work, folder))
        return _course(folder, trouble(config, self._runs.run(config, patience_s=PATIENCE_S)))

    def _with_digits(self, config: RunConfig) -> RunConfig:
        """They are read once: that takes longer than all else that a worker does before its first step."""
        if "--data" in config.args:
            return config
        file = Path(self._folder.name) / "digits.safetensors"
        if not file.exists():
            images, classes = body.read_digits()
            save_file({"images": images, "classes": classes}, file)
        return msgspec.structs.replace(config, args=(*config.args, "--digits", str(file)))


def _config(work: TrialRun, folder: Path) -> RunConfig:
    side, cluster = work.side, folder / "cluster.toml"
    if isinstance(side, SplitSide):
        return RunConfig(
            run=folder.name,
            folder=str(folder),
            script=str(SPLIT_BODY),
            args=work.args,
            workers=work.workers,
            mesh=side.mesh,
            protocol=side.protocol,
            settings=dict(side.settings),
            seed=work.seed,
        )
    cluster.write_text(work.cluster)
    return RunConfig(
        run=folder.name,
        folder=str(folder),
        script=body.__file__,
        args=work.args,
        workers=work.workers,
        protocol=side.protocol,
        settings=dict(side.settings),
        weighting=side.weighting,
        schedule=side.schedule,
        seed=work.seed,
        cluster=virtual(cluster),
    )


def _course(folder: Path, wrong: str) -> Course:
    """What its trace tells. Only a run that diverged may fail."""
    events = list(read_trace(folder))
    result = tally(events).result()
    detail = f"{wrong} {events[-1]}"
    if wrong and NOT_FINITE not in detail and "NaN" not in detail:
        raise RunError(f"a run of {result.protocol} failed: {detail}")
    told: dict[str, float] = {}
    for event in events:
        if isinstance(event, Reported):
            told |= event.values
    return Course(
        seen=[(e.t, e.samples, e.values["accuracy"]) for e in events if isinstance(e, Evaluated)],
        seconds=result.seconds,
        samples=result.samples or 0,
        sent_bytes=result.bytes_sent or 0,
        lssr=result.lssr,
        told=told,
        diverged=bool(wrong),
    )
