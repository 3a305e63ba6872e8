"""`paceline bench papers`: every recipe in turn, what it gave kept, and the rows of its verdicts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

import paceline
from paceline.errors import unknown
from paceline_bench.cluster import cifar
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow, Value
from paceline_bench.kept import keep, read_kept
from paceline_bench.papers.measured import MEASURED_RECIPES
from paceline_bench.papers.paced import PACED_RECIPES
from paceline_bench.papers.peers import PEER_RECIPES
from paceline_bench.papers.planned import PLANNED_RECIPES
from paceline_bench.papers.plot import picture
from paceline_bench.papers.recipe import NEVER, Figure, Open, Recipe, Values, value_of
from paceline_bench.papers.trained.local import TRAINED_LOCAL
from paceline_bench.papers.trained.paced import TRAINED_PACED
from paceline_bench.papers.trained.peers import TRAINED_PEERS
from paceline_bench.papers.trained.split import TRAINED_SPLIT
from paceline_bench.papers.training import Trained, TrialTrainer
from paceline_bench.papers.trial import SplitSide
from paceline_bench.papers.untried import UNTRIED

COMPUTED = (*PACED_RECIPES, *PEER_RECIPES, *PLANNED_RECIPES, *MEASURED_RECIPES)
RECIPES = (*COMPUTED, *TRAINED_PACED, *TRAINED_PEERS, *TRAINED_LOCAL, *TRAINED_SPLIT)
TRIED = {recipe.name: recipe for recipe in RECIPES}
OPEN = {claim.name: claim for claim in UNTRIED}
CANNOT = "cannot be judged here"
NOT_TRIED = "not tried"
"""Stands where others say how they were tried."""


class Tried(msgspec.Struct, frozen=True, tag="tried"):
    """What one recipe gave. Not for trials: their courses are kept, and figures read off them again."""

    recipe: str
    fingerprint: str
    """Of set-up and rule: what was found under another one is not used."""
    version: str
    """Of Paceline."""
    seed: int
    quick: bool
    values: Values


KEPT: Any = Tried | Trained


def check_recipes(plan: BenchPlan) -> None:
    """All that are named exist, and so do the images if some are."""
    for name in plan.recipes:
        if name not in TRIED and name not in OPEN:
            raise unknown("recipe", name, [*TRIED, *OPEN])
    if plan.data is not None:
        cifar.find(Path(plan.data))


def papers(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Those asked for, in that order, or all."""
    named = [TRIED[name] for name in plan.recipes or TRIED if name in TRIED]
    lacking = {} if plan.quick else {each.name: why for each in named if (why := each.lacks()) is not None}
    chosen = [recipe for recipe in named if recipe.name not in lacking]
    found = _tried(chosen, plan, say)
    rows = [
        row for recipe in chosen for row in _rows(_on_images(recipe, plan), found[recipe.name], plan.quick)
    ]
    opened = [claim for claim in OPEN.values() if not plan.recipes or claim.name in plan.recipes]
    return [
        *rows,
        *(_untried_row(TRIED[name], f"{why}.") for name, why in lacking.items()),
        *map(_opened_row, opened),
    ]


def plots_of_papers(rows: list[BenchRow]) -> dict[str, str]:
    """Every judged figure beside the bands of its rule."""
    drawn = picture(rows, TRIED)
    return {"claims": drawn} if drawn else {}


def _tried(chosen: list[Recipe], plan: BenchPlan, say: Say) -> dict[str, Values]:
    path = None if plan.results is None else Path(plan.results)
    kept: list[Tried | Trained] = [] if path is None else read_kept(path, KEPT)
    found = _known(chosen, plan, [each for each in kept if isinstance(each, Tried)])
    todo = [recipe for recipe in chosen if recipe.name not in found]
    if path is not None and found:
        say(f"papers: {len(found)} of {len(chosen)} recipes are in {path} already")
    began, done_s = time.perf_counter(), 0.0
    with TrialTrainer(plan, say, [each for each in kept if isinstance(each, Trained)]) as trainer:
        for number, recipe in enumerate(todo, 1):
            left = _left_s(todo[number - 1 :], done_s, time.perf_counter() - began)
            say(f"papers, {number} of {len(todo)}, {recipe.name}: {recipe.how}; about {left:.0f} s left")
            found[recipe.name] = _values(recipe, plan, trainer)
            done_s += recipe.about_s
            if path is not None and recipe.trial is None:
                keep(path, _kept(recipe, plan, found[recipe.name]))
    return found


def _values(recipe: Recipe, plan: BenchPlan, trainer: TrialTrainer) -> Values:
    """Computed, or trained."""
    if recipe.run is not None:
        return recipe.run(plan)
    assert recipe.trial is not None
    assert recipe.judged is not None
    return trainer.values(recipe.trial, recipe.judged)


def _known(chosen: Iterable[Recipe], plan: BenchPlan, kept: list[Tried]) -> dict[str, Values]:
    """What need not be run again: of the same set-up, rule, seed and version."""
    wanted = {recipe.name: _kept(recipe, plan, {}) for recipe in chosen if recipe.trial is None}
    return {
        each.recipe: each.values
        for each in kept
        if msgspec.structs.replace(each, values={}) == wanted.get(each.recipe)
    }


def _kept(recipe: Recipe, plan: BenchPlan, values: Values) -> Tried:
    return Tried(recipe.name, recipe.fingerprint, paceline.__version__, plan.seed, plan.quick, values)


def _left_s(todo: list[Recipe], done_s: float, spent_s: float) -> float:
    """What the rest usually takes, times how much slower than usual it went so far."""
    usual = sum(recipe.about_s for recipe in todo)
    return usual * spent_s / done_s if done_s else usual


def _on_images(recipe: Recipe, plan: BenchPlan) -> Recipe:
    """What was trained on CIFAR-10 says so; what was found out about the digits is not said of it."""
    trial = recipe.trial
    if (
        plan.data is None
        or trial is None
        or any(isinstance(side, SplitSide) for side in trial.sides.values())
    ):
        return recipe
    return msgspec.structs.replace(recipe, how=f"{recipe.how}, CIFAR-10", explained="")


def _rows(recipe: Recipe, values: Values, quick: bool) -> list[BenchRow]:
    rows = [_row(recipe, figure, values[figure.name], quick) for figure in recipe.figures]
    notes = {
        recipe.name: recipe.claim,
        "source": recipe.source,
        "set-up": recipe.setup,
        "rule": recipe.rule,
        "verdict": "not judged: quick" if quick else recipe.verdict(values),
    }
    if recipe.explained:
        notes["explained"] = recipe.explained
    return [msgspec.structs.replace(rows[0], notes=notes), *rows[1:]]


def _row(recipe: Recipe, figure: Figure, values: list[float], quick: bool) -> BenchRow:
    value = median(values)
    case: dict[str, Value] = {"recipe": recipe.name, "paper": recipe.paper, "claimed": figure.name}
    case |= {"how": recipe.how, "published": figure.published}
    if len(values) > 1:
        case["over seeds"] = _over_seeds(figure, values)
    case["verdict"] = "not judged: quick" if quick else figure.verdict(value, recipe.evidence)
    return msgspec.structs.replace(_valued(figure, value), case=case)


def judged_again(recipe: Recipe, rows: list[BenchRow]) -> list[BenchRow]:
    """What a record holds of a recipe, by the rule that it has now: values stay, verdicts may change."""
    recorded = {str(row.case["claimed"]): row for row in rows}
    values = {name: value for name, row in recorded.items() if (value := value_of(row)) is not None}
    again = []
    for figure in recipe.figures:
        row, value = recorded[figure.name], values[figure.name]
        case = row.case | {"published": figure.published, "verdict": figure.verdict(value, recipe.evidence)}
        again.append(msgspec.structs.replace(row, case=case, remark=_valued(figure, value).remark, notes={}))
    verdict = recipe.verdict({name: [value] for name, value in values.items()})
    notes = rows[0].notes | {"source": recipe.source, "rule": recipe.rule, "verdict": verdict}
    return [msgspec.structs.replace(again[0], notes=notes), *again[1:]]


def _valued(figure: Figure, value: float) -> BenchRow:
    """A row with a number, or the remark that there is none."""
    never = value == inf
    return BenchRow(
        case={},
        measured={},
        figure=figure.unit,
        value=None if never else value,
        remark=NEVER if never else figure.remark(value),
    )


def _over_seeds(figure: Figure, values: list[float]) -> str:
    low, high = (_valued(figure, each).shown or "never" for each in (min(values), max(values)))
    ends = "never" if min(values) == inf else f"{low} to {high}"
    return f"{ends}, {len(values)}"


def _opened_row(claim: Open) -> BenchRow:
    if claim.benchmark:
        return _untried_row(claim, f"{claim.reason}.", f"tried by {claim.takes}")
    return _untried_row(claim, f"{claim.reason}. It would take: {claim.takes}.")


def _untried_row(claim: Open | Recipe, remark: str, verdict: str = CANNOT) -> BenchRow:
    case: dict[str, Value] = {"recipe": claim.name, "paper": claim.paper, "claimed": claim.claim}
    case |= {"how": NOT_TRIED, "published": claim.source, "verdict": verdict}
    return BenchRow(case=case, measured={}, figure="ratio", value=None, remark=remark, tried=False)
