"""What a recipe is: a claim, the published figures, the set-up, and the rule by which ours are judged.

The rule is data. Every figure is of one of these kinds, the same for all recipes, so that none is cut to fit
its result. A ratio is judged by its gain (ratio - 1; of a ratio below 1, that of its inverse), so that a gain
that is missing is not taken for one that is nearly there:

- `close`: a figure that was published; within 15 % of its gain is reproduced, a quarter of it partly. A
  share within 15 % is reproduced, within 40 % partly.
- `between`: a range was published; from 15 % below its lower gain to 15 % above its upper is reproduced, from
  a quarter of the lower on partly.
- `up_to`: the best of a sweep; within 15 % of the published gain is reproduced if the sweep is over the
  paper's inputs. Over inputs of our own choice, and beyond the upper end, it is partly at most; so is a
  quarter of the gain. What is beyond the upper end says so.
- `at_most`: a share with an upper end; not above it is reproduced, at least 5 % less than all partly.
- `level`: no difference was claimed; within 5 % of it is reproduced, within 15 % partly.
- `exact`: the authors' own profile through our planner; nothing but rounding may differ.
- `beyond`: a direction without a figure; 10 % or more is reproduced, 2 % partly.
- `shown_only`: no rule; shown and not judged.

Accuracies are compared as differences in points of a hundred:

- `as_good`: no loss was claimed; at most 1 point behind is reproduced, at most 3 partly.
- `better`: a gain was claimed; 1 point or more is reproduced, anything above 0 partly.
- `gains`: a gain (or a loss) of so many points was claimed; from half to twice of it is reproduced, from a
  tenth on partly.

A ratio is infinite if its first side never got there. A rule with an upper end does not call that reproduced.

How a figure comes about decides what its verdict can be. One that is computed follows from a formula, and
from inputs that were chosen: that it comes near the published one is *by construction*, and says nothing for
the claim. It can only speak against it. A claim is judged by what was trained or measured for it, if anything
was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from math import inf, isfinite
from statistics import median
from typing import Literal

import msgspec

from paceline_bench.harness.plan import BenchPlan
from paceline_bench.harness.record import BenchRow
from paceline_bench.papers.trial import Judged, Trial

Verdict = Literal["reproduced", "by construction", "partly", "not", "cannot be judged here", "not judged"]
Evidence = Literal["trained", "measured", "simulated", "computed"]
"""How figures come about. Trained: by gradients of real models; accuracy counts, and what depends on it.
Measured: by clocks and counters of a machine. Simulated: by a simulator, as the published ones, with the
published inputs as far as they are known. Computed: by a formula, a planner or simulated times, from inputs
that were chosen."""
Unit = Literal["ratio", "share", "seconds", "points", "count"]
Values = dict[str, list[float]]
"""By the name of a figure: one value for each seed."""
NEVER = "never reached by the first"
"""What is said of a ratio that is infinite; JSON has no such number."""
BEYOND = "beyond what was claimed"
"""What is said of a figure above the upper end of an `up_to`."""
ORDER: tuple[Verdict, ...] = (
    "not judged",
    "by construction",
    "reproduced",
    "partly",
    "not",
    "cannot be judged here",
)
"""A recipe's verdict is the last of those of its figures."""
NONE = (inf, -inf)
"""A band in which nothing lies."""
NEAR, HINT = 0.15, 0.25
"""By how much of a published gain ours may differ; how much of it shows the direction at least."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a claim."""

    name: str
    published: str
    unit: Unit = "ratio"
    reproduced: tuple[float, float] | None = None
    """From where to where; None: not judged."""
    partly: tuple[float, float] = NONE
    most: float = inf
    """Above it a result is more than was claimed, which is said beside its verdict."""
    computed: bool = False
    """Whether it follows from chosen inputs, although its recipe trains or measures something else."""

    def by_rule(self, value: float) -> Verdict:
        """What the bands say, however the value came about."""
        if self.reproduced is None:
            return "not judged"
        if _within(value, self.reproduced):
            return "reproduced"
        return "partly" if _within(value, self.partly) else "not"

    def verdict(self, value: float, evidence: Evidence) -> Verdict:
        """By the rule, and by how the value came about."""
        by_rule = self.by_rule(value)
        if by_rule in ("reproduced", "partly") and self._computed(evidence):
            return "by construction"
        return by_rule

    def remark(self, value: float) -> str:
        """What has to be said beside the verdict."""
        return BEYOND if isfinite(value) and value > self.most else ""

    def rule(self, evidence: Evidence) -> str:
        """The same for people."""
        if self.reproduced is None:
            return f"{self.name}: shown, not judged"
        bands = [band for band in (self.reproduced, self.partly) if band != NONE]
        above = f"; above {self.most:.6g} beyond what was claimed" if self.most < inf else ""
        if self._computed(evidence):
            lows, highs = zip(*bands, strict=True)
            return f"{self.name}: by construction {_range((min(lows), max(highs)))}, else not{above}"
        words = [
            f"{verdict} {_range(band)}"
            for verdict, band in (("reproduced", self.reproduced), ("partly", self.partly))
            if band in bands
        ]
        return f"{self.name}: {', '.join(words)}, else not{above}"

    def _computed(self, evidence: Evidence) -> bool:
        return self.computed or evidence == "computed"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How one claim is tried."""

    name: str
    paper: str
    claim: str
    source: str
    """Where the published figures stand."""
    setup: str
    evidence: Evidence
    how: str
    """The same more closely: simulated times, a planner's prediction, a formula, measured on what."""
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
        return "; ".join(figure.rule(self.evidence) for figure in self.figures)

    @property
    def fingerprint(self) -> str:
        """A result that was kept is of use as long as this is the same."""
        words = (self.setup, self.rule, *(figure.published for figure in self.figures))
        trial = b"" if self.trial is None else msgspec.json.encode(self.trial)
        return sha256("\n".join(words).encode() + trial).hexdigest()[:16]

    def verdict(self, values: Mapping[str, list[float]]) -> Verdict:
        """That of the figure which went worst; medians count."""
        return worst(self.figures, values, self.evidence)


def worst(figures: Iterable[Figure], values: Mapping[str, list[float]], evidence: Evidence) -> Verdict:
    """The verdict of the figure which went worst; medians count."""
    each = [figure.verdict(median(values[figure.name]), evidence) for figure in figures]
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
    """Which other benchmark tries it, by its newest record. Its findings say whether they are in the
    published range, unless there are"""
    figures: tuple[Figure, ...] = ()
    """to judge"""
    values: Callable[[list[BenchRow]], dict[str, float]] | None = None
    """what is found in that record's rows; nothing if it does not hold all of them."""


def value_of(row: BenchRow) -> float | None:
    """Of a figure; infinite where its first side never got there."""
    return inf if row.remark == NEVER else row.value


def close(
    name: str, published: float, unit: Unit = "ratio", shown: str = "", computed: bool = False
) -> Figure:
    """A published figure."""
    if unit == "ratio":
        near, hint = _gained(published, 1 - NEAR, 1 + NEAR), _gained(published, HINT, inf)
    else:
        near, hint = (0.85 * published, 1.15 * published), (0.6 * published, 1.4 * published)
    text = shown or (f"{published:.2f}x" if unit == "ratio" else f"{100 * published:.1f} %")
    return Figure(name=name, published=text, unit=unit, reproduced=near, partly=hint, computed=computed)


def up_to(name: str, published: float, shown: str = "", *, inputs: Literal["paper's", "ours"]) -> Figure:
    """The best that was published, against the best of a sweep over those inputs."""
    near, hint = _gained(published, 1 - NEAR, 1 + NEAR), _gained(published, HINT, inf)
    text = shown or f"up to {published:g}x"
    reproduced = near if inputs == "paper's" else NONE
    return Figure(name=name, published=text, reproduced=reproduced, partly=hint, most=near[1])


def between(name: str, low: float, high: float, computed: bool = False) -> Figure:
    """A published range."""
    near = (_gained(low, 1 - NEAR, inf)[0], _gained(high, 0, 1 + NEAR)[1])
    text, hint = f"{low:g}x to {high:g}x", _gained(low, HINT, inf)
    return Figure(name=name, published=text, reproduced=near, partly=hint, computed=computed)


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


def beyond(name: str, shown: str, computed: bool = False) -> Figure:
    """A direction without a figure."""
    near, hint = (1.1, inf), (1.02, inf)
    return Figure(name=name, published=shown, reproduced=near, partly=hint, computed=computed)


def as_good(name: str, shown: str = "no loss") -> Figure:
    """Points ahead; behind is below 0."""
    return Figure(name=name, published=shown, unit="points", reproduced=(-1.0, inf), partly=(-3.0, inf))


def better(name: str, shown: str = "better") -> Figure:
    """A gain without a figure, in points."""
    return Figure(name=name, published=shown, unit="points", reproduced=(1.0, inf), partly=(1e-9, inf))


def gains(name: str, published: float, shown: str = "", high: float | None = None) -> Figure:
    """A gain of so many points, or of a range from there to `high`; a loss if it is below 0."""
    near, hint = (0.5 * published, 2 * (high or published)), (0.1 * published, inf)
    if published < 0:
        near, hint = (near[1], near[0]), (-inf, hint[0])
    text = shown or f"{published:+.1f} points"
    return Figure(name=name, published=text, unit="points", reproduced=near, partly=hint)


def shown_only(name: str, published: str = "", unit: Unit = "ratio") -> Figure:
    """Not judged."""
    return Figure(name=name, published=published, unit=unit)


def _gained(published: float, low: float, high: float) -> tuple[float, float]:
    """From where to where a ratio has from so much to so much of the published gain."""
    if published < 1:
        least, most = _gained(1 / published, low, high)
        return 1 / most, 1 / least
    return 1 + low * (published - 1), 1 + high * (published - 1)


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def _range(bounds: tuple[float, float]) -> str:
    low, high = bounds
    if high == inf:
        return f"from {low:.6g}"
    return f"up to {high:.6g}" if low == -inf else f"{low:.6g} to {high:.6g}"
