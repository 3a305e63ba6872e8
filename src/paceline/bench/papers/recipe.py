"""What a recipe is: a claim, the published figures, the set-up, and the rule by which ours are judged.

The rule is data. Every figure is of one of these kinds, the same for all recipes, so that none is cut to fit
its result:

- `close`: a figure that was published; within 15 % of it is reproduced, the right direction is partly.
- `between`: a range was published; from 15 % below it to 15 % above it is reproduced, 5 % or more partly.
- `up_to`: the best of a sweep; at least 85 % of what was published is reproduced, 5 % or more partly.
- `at_most`: a share with an upper end; not above it is reproduced, at least 5 % less than all partly.
- `level`: no difference was claimed; within 5 % of it is reproduced, within 15 % partly.
- `exact`: the authors' own profile through our planner; nothing but rounding may differ.
- `beyond`: a direction without a figure; 10 % or more is reproduced, 2 % partly.
- `shown_only`: no rule; shown and not judged.

Accuracies are compared as differences in points of a hundred:

- `as_good`: no loss was claimed; at most 1 point behind is reproduced, at most 3 partly.
- `better`: a gain was claimed; 1 point or more is reproduced, anything above 0 partly.
- `gains`: a gain (or a loss) of so many points was claimed; from half of it on is reproduced, a tenth partly.

A ratio is infinite if its first side never got there. A rule with an upper end does not call that reproduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from math import inf
from statistics import median
from typing import Literal

import msgspec

from paceline.bench.harness.plan import BenchPlan
from paceline.bench.papers.trial import Judged, Trial

Verdict = Literal["reproduced", "partly", "not", "cannot be judged here", "not judged"]
Unit = Literal["ratio", "share", "seconds", "points", "count"]
Values = dict[str, list[float]]
"""By the name of a figure: one value for each seed."""
NEVER = "never reached by the first"
"""What is said of a ratio that is infinite; JSON has no such number."""
ORDER: tuple[Verdict, ...] = ("not judged", "reproduced", "partly", "not", "cannot be judged here")
"""A recipe's verdict is the last of those of its figures."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a claim."""

    name: str
    published: str
    unit: Unit = "ratio"
    reproduced: tuple[float, float] | None = None
    """From where to where; None: not judged."""
    partly: tuple[float, float] = (inf, -inf)

    def verdict(self, value: float) -> Verdict:
        """By the rule, and nothing else."""
        if self.reproduced is None:
            return "not judged"
        if _within(value, self.reproduced):
            return "reproduced"
        return "partly" if _within(value, self.partly) else "not"

    @property
    def rule(self) -> str:
        """The same for people."""
        if self.reproduced is None:
            return f"{self.name}: shown, not judged"
        partly = "" if self.partly[0] > self.partly[1] else f", partly {_range(self.partly)}"
        return f"{self.name}: reproduced {_range(self.reproduced)}{partly}, else not"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How one claim is tried."""

    name: str
    paper: str
    claim: str
    source: str
    """Where the published figures stand."""
    setup: str
    how: str
    """What kind of evidence it is: simulated times, a planner's prediction, a formula, measured."""
    figures: tuple[Figure, ...]
    explained: str
    """Where the gain comes from, and what the set-up leaves out."""
    run: Callable[[BenchPlan], Values] | None = None
    """What gives the values; None: a trial does."""
    trial: Trial | None = None
    """What has to be trained,"""
    judged: Judged | None = None
    """and the figures that the courses of one seed come to."""
    lacks: Callable[[], str | None] = lambda: None
    """Why this machine cannot try it; None: it can."""
    about_s: float = 1.0
    """How long it takes, about, if not quick."""

    @property
    def rule(self) -> str:
        """Of all figures."""
        return "; ".join(figure.rule for figure in self.figures)

    @property
    def fingerprint(self) -> str:
        """A result that was kept is of use as long as this is the same."""
        words = (self.setup, self.rule, *(figure.published for figure in self.figures))
        trial = b"" if self.trial is None else msgspec.json.encode(self.trial)
        return sha256("\n".join(words).encode() + trial).hexdigest()[:16]

    def verdict(self, values: Mapping[str, list[float]]) -> Verdict:
        """That of the figure which went worst; medians count."""
        each = [figure.verdict(median(values[figure.name])) for figure in self.figures]
        return max(each, key=ORDER.index)


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that is not tried yet, and why."""

    name: str
    paper: str
    claim: str
    source: str
    reason: str
    takes: str
    """What it would take."""
    benchmark: str = ""
    """Which other benchmark tries it; its findings say whether they are in the published range."""


def close(name: str, published: float, unit: Unit = "ratio", shown: str = "") -> Figure:
    """A published figure; on the same side of 1 as it is the right direction, for ratios."""
    near = (0.85 * published, 1.15 * published)
    if unit == "ratio":
        partly = (1.05, inf) if published > 1 else (-inf, 0.95)
    else:
        partly = (0.6 * published, 1.4 * published)
    text = shown or (f"{published:.2f}x" if unit == "ratio" else f"{100 * published:.1f} %")
    return Figure(name=name, published=text, unit=unit, reproduced=near, partly=partly)


def up_to(name: str, published: float, shown: str = "") -> Figure:
    """The best that was published, against the best of a sweep."""
    text = shown or f"up to {published:g}x"
    return Figure(name=name, published=text, reproduced=(0.85 * published, inf), partly=(1.05, inf))


def between(name: str, low: float, high: float) -> Figure:
    """A published range."""
    near = (0.85 * low, 1.15 * high)
    return Figure(name=name, published=f"{low:g}x to {high:g}x", reproduced=near, partly=(1.05, inf))


def at_most(name: str, published: float, shown: str) -> Figure:
    """A share of something, with an upper end."""
    near, less = (0.0, published + 1e-6), (0.0, 0.95)
    return Figure(name=name, published=shown, unit="share", reproduced=near, partly=less)


def level(name: str, published: float = 1.0, shown: str = "level") -> Figure:
    """No difference was claimed."""
    near, apart = (0.95 * published, 1.05 * published), (0.85 * published, 1.15 * published)
    return Figure(name=name, published=shown, reproduced=near, partly=apart)


def exact(name: str, published: float) -> Figure:
    """Seconds that the authors' own profile gives: recomputed from what they published, not printed there."""
    near = (published * (1 - 1e-6), published * (1 + 1e-6))
    return Figure(name=name, published=f"{published:g} s (recomputed)", unit="seconds", reproduced=near)


def beyond(name: str, shown: str) -> Figure:
    """A direction without a figure."""
    return Figure(name=name, published=shown, reproduced=(1.1, inf), partly=(1.02, inf))


def as_good(name: str, shown: str = "no loss") -> Figure:
    """Points ahead; behind is below 0."""
    return Figure(name=name, published=shown, unit="points", reproduced=(-1.0, inf), partly=(-3.0, inf))


def better(name: str, shown: str = "better") -> Figure:
    """A gain without a figure, in points."""
    return Figure(name=name, published=shown, unit="points", reproduced=(1.0, inf), partly=(1e-9, inf))


def gains(name: str, published: float, shown: str = "") -> Figure:
    """A gain of so many points; a loss if it is below 0."""
    near, hint = (0.5 * published, inf), (0.1 * published, inf)
    if published < 0:
        near, hint = (-inf, 0.5 * published), (-inf, 0.1 * published)
    text = shown or f"{published:+.1f} points"
    return Figure(name=name, published=text, unit="points", reproduced=near, partly=hint)


def shown_only(name: str, published: str = "", unit: Unit = "ratio") -> Figure:
    """Not judged."""
    return Figure(name=name, published=published, unit=unit)


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def _range(bounds: tuple[float, float]) -> str:
    low, high = bounds
    if high == inf:
        return f"from {low:.6g}"
    return f"up to {high:.6g}" if low == -inf else f"{low:.6g} to {high:.6g}"
