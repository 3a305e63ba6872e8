"""The table of the comparison with rivals: medians and ranges over seeds; who did not run, and why."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isinf
from statistics import median

from paceline_bench.cluster.course import Figures
from paceline_bench.cluster.results import Outcome, Results
from paceline_bench.cluster.scene import MODEL_BYTES, Scene
from paceline_bench.cluster.table import remarks
from paceline_bench.harness.record import BenchRow, Value
from paceline_bench.harness.stats import at_edge
from paceline_bench.rivals.killed import Killed
from paceline_bench.rivals.roster import Rival, Side
from paceline_bench.rivals.series import Contest

ROUND = "less than one model went over the slow link: it found a way round it, and its times mean nothing"
BASE = "ddp"
"""With which all are compared."""


def rows_of(contest: Contest, results: Results) -> list[BenchRow]:
    """One row per side and target."""
    trained = contest.trained
    return [
        _row(contest, side, target, results) for side in trained.sides for target in trained.scene.targets
    ]


def _row(contest: Contest, side: Side, target: float, results: Results) -> BenchRow:
    trained, killed = (series.outcomes(side, results) for series in contest)
    case: dict[str, Value] = {"side": side.title, "kind": "rival" if isinstance(side, Rival) else "ours"}
    case |= {"settings": side.settings if isinstance(side, Rival) else side.shown}
    case |= {"version": next((each.about for each in trained if each.about), "")}
    case |= _reached(contest, side, target, trained, results) | _after_kill(killed)
    return BenchRow(
        case=case,
        measured={},
        figure="ratio",
        value=_ratio(contest, trained, target, results),
        remark=_remark(contest, side, trained, killed),
    )


def _reached(
    contest: Contest, side: Side, target: float, trained: list[Outcome], results: Results
) -> dict[str, Value]:
    figures = _figures(trained)
    if not figures:
        return {"time": "did not run"}
    moved = [each.slow_link_bytes for each in trained if each.figures is not None]
    return {
        "lr": contest.trained.best(side, results).lr,
        "rates tried": len(contest.trained.tried(side)),
        "seeds": len(trained),
        "to": f"{100 * target:g} %",
        "time": times_text([inf if (seen := each.to(target)) is None else seen.seconds for each in trained]),
        "samples/s": spread([each.samples_per_s for each in figures], "", 0),
        "waiting": spread([100 * each.waiting for each in figures], " %", 0),
        "slow link, MB": spread([each / 1e6 for each in moved], "", 1),
        "slow link, kB a sample": spread(_per_sample(trained), "", 1),
    }


def times_text(seconds: Sequence[float]) -> str:
    """A median and a range, in which who never got there counts as infinitely late."""
    missed = sum(isinf(each) for each in seconds)
    if not missed:
        return spread(seconds, " s", 1)
    some = f", {len(seconds) - missed} of {len(seconds)} from {min(seconds):,.1f} s on"
    if isinf(median(seconds)):
        return "not reached" + ("" if missed == len(seconds) else some)
    return f"{median(seconds):,.1f} s ({min(seconds):,.1f}-never: {missed} of {len(seconds)})"


def _per_sample(trained: list[Outcome]) -> list[float]:
    """Runs end at different times, so that what a sample costs is what can be compared."""
    ran = [(each.slow_link_bytes, each.figures) for each in trained]
    return [moved / 1e3 / (f.samples_per_s * f.seconds) for moved, f in ran if f is not None and f.seconds]


def _after_kill(killed: list[Outcome]) -> dict[str, Value]:
    seen = [each.killed for each in killed if each.killed is not None]
    if not seen:
        return {"killed: job finishes": "did not run"} if killed else {}
    return {
        "killed: job finishes": _share([each.finished for each in seen]),
        "others go on": _share([each.went_on for each in seen]),
        "stood still or until the end": spread([each.still_s for each in seen], " s", 1),
        "exit status": ", ".join(dict.fromkeys(_status(each) for each in seen)),
        "samples lost": spread([100 * each.lost / each.planned for each in seen], " %", 1)
        + (" (cut off)" if not all(each.ended for each in seen) else ""),
        "computed in vain": spread([100 * each.repeated / each.planned for each in seen], " %", 1),
    }


def _status(killed: Killed) -> str:
    """Of the first host's process, which is the job's, and of the others where it differs."""
    first = next(iter(killed.statuses.values()), None)
    return "had to be ended" if first is None else str(first)


def _share(answers: Sequence[bool]) -> str:
    if all(answers) or not any(answers):
        return "yes" if answers[0] else "no"
    return f"{sum(answers)} of {len(answers)}"


def _ratio(contest: Contest, trained: list[Outcome], target: float, results: Results) -> float | None:
    """DDP's median time over this one's; None without DDP, or if a run of them never got there."""
    base = next((side for side in contest.trained.sides if side.title == BASE), None)
    if base is None:
        return None
    both = [contest.trained.outcomes(base, results), trained]
    times = [[each.to(target) for each in side] for side in both]
    if not all(side and None not in side for side in times):
        return None
    middle = [median(each.seconds for each in side if each is not None) for side in times]
    return middle[0] / middle[1]


def _remark(contest: Contest, side: Side, trained: list[Outcome], killed: list[Outcome]) -> str:
    said = [text for each in trained for text in remarks(each, contest.trained.scene, False)]
    tried = [job.lr for job in contest.trained.tried(side)]
    said += [
        edge for each in trained[:1] if each.figures is not None and (edge := at_edge(each.job.lr, tried))
    ]
    said += [ROUND for each in trained if each.figures is not None and each.slow_link_bytes < MODEL_BYTES]
    said += [f"killed: {each.killed.words}" for each in killed if each.killed and each.killed.words]
    said += [f"killed: {each.trouble}" for each in killed if each.trouble and each.trouble not in said]
    return "; ".join(dict.fromkeys(text.replace("|", "/") for text in said))


def told(outcome: Outcome, scene: Scene) -> str:
    """A run in one line."""
    killed, figures = outcome.killed, outcome.figures
    if outcome.trouble or figures is None:
        return f"did not run to its end: {outcome.trouble or 'nobody took a step'}"
    if killed is not None:
        went = (
            f"went on after {killed.still_s:.1f} s"
            if killed.went_on
            else f"over after {killed.still_s:.1f} s"
        )
        return f"{went}, {'finished' if killed.finished else 'did not finish'}, {killed.lost} samples lost"
    reached = [outcome.to(target) for target in scene.targets]
    parts = [
        "not reached" if each is None else f"{100 * each.target:g} % {each.seconds:.1f} s" for each in reached
    ]
    return ", ".join([*parts, f"{figures.samples_per_s:.0f} samples/s", *remarks(outcome, scene, False)])


def spread(values: Sequence[float], unit: str, digits: int) -> str:
    """A median, and from where to where."""
    if not values:
        return ""
    middle = f"{median(values):,.{digits}f}{unit}"
    low, high = f"{min(values):,.{digits}f}", f"{max(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({low}-{high})"


def _figures(trained: Sequence[Outcome]) -> list[Figures]:
    return [each.figures for each in trained if each.figures is not None]
