"""Several results side by side: what the rows say and what each is measured against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paceline.protocols import PACED, PEERS
from paceline.protocols.settings import about
from paceline.trace import Result
from paceline.view import figures

BASELINE = "bsp"
"""What the others are compared with: the protocol people run when they have not chosen one."""


class Speedup(NamedTuple):
    """How many times faster than the baseline, and by which measure."""

    factor: float
    by: Literal["target", "samples"]


class CompareRow(NamedTuple):
    """One run, every figure written out."""

    label: str
    to_target: str
    samples_per_s: str
    waiting: str
    staleness: str
    max_gap: str
    accuracy: str
    speedup: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows with their headings, and what must be said below them."""

    headings: CompareRow
    rows: list[CompareRow]
    caption: str


def compare(results: Sequence[Result]) -> Comparison:
    """Write out several results as one table."""
    gains = speedups(results)
    bases = {gain.by for gain in gains if gain}
    rows = [
        _row(result, label, gain, mark=len(bases) > 1)
        for result, label, gain in zip(results, labels(results), gains, strict=True)
    ]
    return Comparison(
        _headings(results), rows, " ".join([_caption(results, bases), *_moments(results, rows)])
    )


def labels(results: Sequence[Result]) -> list[str]:
    """A name for each run that tells it from the others; its status unless it simply finished."""
    titles = [figures.title(r, unusual_settings(r.protocol, r.settings)) for r in results]
    common = Counter(titles)
    named = [
        f"{title} ({result.run})" if common[title] > 1 else title
        for title, result in zip(titles, results, strict=True)
    ]
    return [
        label if result.status == "finished" else f"{label} [{result.status}]"
        for label, result in zip(named, results, strict=True)
    ]


def unusual_settings(protocol: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not the protocol's defaults: a table has no room for the others."""
    if protocol not in PACED and protocol not in PEERS:
        return dict(settings)
    usual = {setting.name: setting.default for setting in about(protocol).settings}
    return {name: value for name, value in settings.items() if usual.get(name) != value}


def speedups(results: Sequence[Result]) -> list[Speedup | None]:
    """Each run against the first plain BSP run on the same kind of clock: real or simulated.

    Time to target is what counts; where one of the two never got there, the time that the same
    number of samples takes stands in for it.
    """
    baselines: dict[bool, Result] = {}
    for result in results:
        if result.protocol == BASELINE and not result.balance:
            baselines.setdefault(result.simulated, result)
    return [_speedup(baselines.get(result.simulated), result) for result in results]


def _speedup(baseline: Result | None, result: Result) -> Speedup | None:
    if baseline is None:
        return None
    if baseline.time_to_target_s and result.time_to_target_s and baseline.target == result.target:
        return Speedup(baseline.time_to_target_s / result.time_to_target_s, "target")
    if baseline.samples_per_s and result.samples_per_s:
        return Speedup(result.samples_per_s / baseline.samples_per_s, "samples")
    return None


def _row(result: Result, label: str, gain: Speedup | None, mark: bool) -> CompareRow:
    staleness = result.staleness
    return CompareRow(
        label,
        figures.known(result.time_to_target_s, figures.seconds),
        figures.known(result.samples_per_s, figures.rate),
        figures.waiting(result.waiting_share),
        figures.DASH if staleness is None else f"{staleness.mean:,.1f} / {staleness.max:,}",
        figures.known(result.max_clock_gap, figures.count),
        figures.known(result.accuracy, figures.accuracy),
        figures.known(gain, lambda known: _gain(known, mark)),
    )


def _gain(gain: Speedup, mark: bool) -> str:
    return f"{gain.factor:.2f}×" + ("*" if mark and gain.by == "samples" else "")


def _headings(results: Sequence[Result]) -> CompareRow:
    targets = {result.target for result in results}
    only = targets.pop() if len(targets) == 1 else None
    to_target = "to target" if only is None else f"to {figures.threshold(only)}"
    return CompareRow(
        "protocol", to_target, "samples/s", "waiting", "staleness", "gap", "accuracy", "speed-up"
    )


def _caption(results: Sequence[Result], bases: set[Literal["target", "samples"]]) -> str:
    sentences = ["Waiting: share of each worker's time, rank 0 first."]
    if any(len(result.waiting_share) > figures.MANY_WORKERS for result in results):
        sentences = ["Waiting: share of the workers' time."]
    sentences.append("Staleness: mean / max. Gap: largest lead over the slowest.")
    if any(result.balance for result in results):
        sentences.append("Balance: batches in proportion to each worker's speed.")
    if bases:
        sentences.append(f"Speed-up over {BASELINE} by {_basis(bases)}.")
    sentences += [f"{kind[0].upper()}{kind[1:]}." for kind in figures.kinds(results)]
    return " ".join(sentences)


def _moments(results: Sequence[Result], rows: Sequence[CompareRow]) -> list[str]:
    """Whose accuracy is not that of its end."""
    named = [
        (row.label, figures.moment(result, result.accuracy_at))
        for result, row in zip(results, rows, strict=True)
    ]
    return [f"Accuracy of {label}{moment}." for label, moment in named if moment]


def _basis(bases: set[Literal["target", "samples"]]) -> str:
    if bases == {"target"}:
        return "time to target"
    if bases == {"samples"}:
        return "time for the same samples"
    return "time to target; * by time for the same samples"
