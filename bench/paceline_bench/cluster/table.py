"""The table of the benchmark of a small cluster: medians over seeds, with ranges, against DDP."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from paceline_bench.cluster.course import Figures
from paceline_bench.cluster.entries import WANTED, WANTED_EQUAL, Entry
from paceline_bench.cluster.other import NAME as DDP
from paceline_bench.cluster.results import Job, Outcome, Results
from paceline_bench.cluster.scene import Scene
from paceline_bench.cluster.series import Series
from paceline_bench.harness.record import BenchRow, Value

TOLERATED = 0.02
"""Share of iterations that may take longer than their device; beyond, the row says so."""
NEAR = 0.5
"""Points by which the final accuracy may be below DDP's."""


def rows_of(series: Series[Entry], results: Results) -> list[BenchRow]:
    """One row per entry and target."""
    seen = [(entry, series.outcomes(entry, results)) for entry in series.sides]
    theirs = next(outcomes for entry, outcomes in seen if entry.protocol == DDP)
    rows = []
    for entry, ours in seen:
        if series.scene.targets:
            rows += [_row(series, entry, target, ours, theirs, results) for target in series.scene.targets]
        else:
            rows.append(_final_row(series, entry, ours, theirs, results))
    return rows


def _row(
    series: Series[Entry],
    entry: Entry,
    target: float,
    ours: list[Outcome],
    theirs: list[Outcome],
    results: Results,
) -> BenchRow:
    scene = series.scene
    case = _about(series, entry, ours, results) | {"to": f"{100 * target:g} %"}
    case |= {"time": _times(ours, target), "samples": _samples(ours, target)} | _pace(ours, series.simulated)
    return BenchRow(
        case=case,
        measured={},
        figure="ratio",
        value=_ratio(ours, theirs, target),
        target=_wanted(scene, entry) if entry.protocol != DDP else None,
        remark=_remark(ours, scene, series.simulated),
    )


def _final_row(
    series: Series[Entry], entry: Entry, ours: list[Outcome], theirs: list[Outcome], results: Results
) -> BenchRow:
    """Where all take the same samples, it is accuracy that differs, and the time they took."""
    mine, ddp = _accuracies(ours), _accuracies(theirs)
    case = _about(series, entry, ours, results) | {"time": _spread([f.seconds for f in _figures(ours)], "s")}
    case |= {"accuracy": _spread([100 * x for x in mine], "%"), "points against ddp": _points(mine, ddp)}
    case |= {"near": _near(mine, ddp)} | _pace(ours, series.simulated)
    times = [[f.seconds for f in _figures(each)] for each in (theirs, ours)]
    return BenchRow(
        case=case,
        measured={},
        figure="ratio",
        value=median(times[0]) / median(times[1]) if all(times) else None,
        remark=_remark(ours, series.scene, series.simulated),
    )


def _about(series: Series[Entry], entry: Entry, ours: list[Outcome], results: Results) -> dict[str, Value]:
    tried, best = series.tried(entry), series.best(entry, results)
    corrected = {f.correct for f in _figures(ours)}
    return {
        "hosts": series.scene.name,
        "protocol": entry.protocol if entry.protocol == DDP else entry.title,
        "settings": entry.shown,
        "correction": ", ".join(sorted(corrected)),
        "lr": best.lr,
        "rates tried": _rates(tried, series.scene, results) if len(tried) > 1 else "",
        "seeds": len(ours),
    }


def _rates(tried: list[Job], scene: Scene, results: Results) -> str:
    target = scene.targets[0] if scene.targets else None
    return ", ".join(f"{job.lr:g}: {_time_of(results.get(job), target)}" for job in tried)


def _time_of(outcome: Outcome | None, target: float | None) -> str:
    if outcome is None or outcome.figures is None:
        return "did not run"
    if target is None:
        return f"{100 * (outcome.figures.accuracy or 0.0):.1f} %"
    reached = outcome.to(target)
    return "not reached" if reached is None else f"{reached.seconds:.1f} s"


def _times(outcomes: list[Outcome], target: float) -> str:
    reached = [each.to(target) for each in outcomes]
    if not _figures(outcomes):
        return "did not run"
    missed = sum(each is None for each in reached)
    told = _spread([each.seconds for each in reached if each is not None], "s")
    if not missed:
        return told
    return "not reached" if missed == len(reached) else f"{told}; not reached by {missed} of {len(reached)}"


def _samples(outcomes: list[Outcome], target: float) -> str:
    return _spread([each.samples for out in outcomes if (each := out.to(target)) is not None], "")


def _ratio(ours: list[Outcome], theirs: list[Outcome], target: float) -> float | None:
    """DDP's median time over this one's; None if a run of them never got there."""
    times = [[each.to(target) for each in side] for side in (theirs, ours)]
    if not all(side and None not in side for side in times):
        return None
    medians = [median(each.seconds for each in side if each is not None) for side in times]
    return medians[0] / medians[1]


def _wanted(scene: Scene, entry: Entry) -> float | None:
    if scene.name == "unequal":
        return WANTED.get(entry.title)
    return WANTED_EQUAL if scene.name == "equal" and entry.protocol in WANTED else None


def _pace(outcomes: list[Outcome], simulated: bool) -> dict[str, Value]:
    figures = _figures(outcomes)
    if not figures:
        return {}
    case: dict[str, Value] = {"samples/s": round(median(f.samples_per_s for f in figures))}
    if not simulated:
        case["MB over the slow link"] = round(median(each.slow_link_bytes for each in outcomes) / 1e6, 1)
    return case | {"waiting": f"{100 * median(f.waiting for f in figures):.0f} %"}


def _remark(outcomes: list[Outcome], scene: Scene, simulated: bool) -> str:
    """Whatever has to be known beside the figures."""
    said = [text for each in outcomes for text in remarks(each, scene, simulated)]
    return "; ".join(dict.fromkeys(said))


def remarks(outcome: Outcome, scene: Scene, simulated: bool) -> list[str]:
    """Of one run."""
    figures, said = outcome.figures, [outcome.trouble] if outcome.trouble else []
    if figures is None:
        return said or ["nobody took a step"]
    if scene.targets and outcome.to(scene.targets[-1]) is None and figures.best is not None:
        said.append(f"best accuracy {100 * figures.best:.1f} % in {figures.seconds:.0f} s")
    if len(figures.ranks) < scene.workers:
        said.append(f"only ranks {sorted(figures.ranks)} took part")
    if figures.late > TOLERATED and not simulated and scene.stall is None:
        said.append(f"{100 * figures.late:.0f} % of iterations took longer than their device")
    return [*said, *figures.lost]


def told(outcome: Outcome, scene: Scene) -> str:
    """A run in one line."""
    figures = outcome.figures
    if figures is None:
        return f"did not run: {outcome.trouble or 'nobody took a step'}"
    parts = [f"{100 * target:g} % {_time_of(outcome, target)}" for target in scene.targets]
    parts += [] if scene.targets else [f"{_time_of(outcome, None)} in {figures.seconds:.0f} s"]
    parts.append(f"{figures.samples_per_s:.0f} samples/s")
    return ", ".join([*parts, *remarks(outcome, scene, outcome.job.simulated)])


def _accuracies(outcomes: list[Outcome]) -> list[float]:
    return [figures.accuracy for figures in _figures(outcomes) if figures.accuracy is not None]


def _points(mine: list[float], ddp: list[float]) -> str:
    return f"{100 * (fmean(mine) - fmean(ddp)):+.2f}" if mine and ddp else ""


def _near(mine: list[float], ddp: list[float]) -> str:
    """Whether the mean is as good as DDP's, but for so many points."""
    if not (mine and ddp):
        return ""
    return "yes" if 100 * (fmean(ddp) - fmean(mine)) <= NEAR else "no"


def _figures(outcomes: Sequence[Outcome]) -> list[Figures]:
    return [each.figures for each in outcomes if each.figures is not None]


def _spread(values: Sequence[float], unit: str) -> str:
    """A median, and from where to where."""
    if not values:
        return ""
    digits, unit = (0, "") if unit == "" else (1, f" {unit}")
    middle = f"{median(values):,.{digits}f}{unit}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"
