"""The staleness advisor: measured, modelled and given figures in, advice out.

Paper: Yu, Chen, Poor, arXiv 2406.11159 (see `delays`).

Every figure that goes in says where it comes from, since advice is as good as its inputs: *measured*
on this model or this run, *modelled* (a cluster file, an assumption), or *given* by the user.
Margins are reported; nothing is refused for being near the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Literal

import msgspec

from paceline.plan.staleness.floor import poisson_factor
from paceline.plan.staleness.follow import Follow, follow
from paceline.plan.staleness.landscape import Fact, Landscape, Origin, Request
from paceline.plan.staleness.observe import ENOUGH_CYCLES, Observed
from paceline.plan.staleness.outlook import Direction, Outlook
from paceline.plan.staleness.policies import (
    SAFE_LR,
    LearningRates,
    PolicyStep,
    best,
    group_survey,
    is_worth_it,
    learning_rates,
    lockstep,
    outlook,
    survey,
)
from paceline.plan.staleness.roots import FAR
from paceline.plan.staleness.thresholds import Threshold, best_threshold, thresholds


class Advice(msgspec.Struct, frozen=True):
    """What the advisor says. In JSON both the unknown and the infinite are null."""

    inputs: list[Fact]
    objective: Literal["time to target", "rate"]
    learning_rate: LearningRates
    """For all workers."""
    now: Outlook
    """All workers, at the learning rate in question."""
    best: Outlook | None
    """The number of active workers to choose; None: no number is within the safety share."""
    active: list[int]
    """Their ranks, fastest first; the others are better parked."""
    workers: list[Outlook]
    """By number of active workers, up to those that saturate the store."""
    lockstep: Outlook
    """All workers, waiting for each other."""
    group: int | None
    """How many gradients to average per update, nobody waiting; None: it would not help."""
    groups: dict[int, Outlook]
    threshold: Threshold | None
    """Gradients to drop for their age; None: it would not help."""
    thresholds: list[Threshold]
    follow: Follow
    """The best of these as settings of a run."""
    warnings: list[str]


def advise(
    observed: Observed,
    land: Landscape,
    request: Request,
    progress: Callable[[float], None] = lambda share: None,
) -> Advice:
    """All advice at once."""
    crew, target, each = observed.crew, request.target_loss, 1 / (observed.triggered or 1.0)
    directions = [_calmer(direction, each) for direction in land.directions]
    count = len(crew.cycles)
    flow = crew.flow(count)
    weighting = request.weighting or observed.weighting or "mean"
    safe = min(SAFE_LR, request.safety)
    rates = learning_rates(flow, land.sharpest, PolicyStep(1.0, request.momentum, weighting, each), safe)
    step = PolicyStep(request.lr or rates.safe, request.momentum, weighting, each)
    by_count = survey(crew, directions, step, target, progress)
    now = outlook(crew, directions, step, count, target)
    chosen = _worthy(best(by_count, request.safety), now, request.safety)
    groups = group_survey(flow, directions, step, target)
    found = thresholds(flow, directions, step, target=target)
    group, threshold = _group(groups, now, request.safety), _threshold(found, request.safety)
    active = list(crew.ranks[: chosen.workers]) if chosen else []
    grouped = None if group is None else (group, groups[group])
    return Advice(
        inputs=[*_timing_facts(observed), *land.facts, *_step_facts(request, observed, step)],
        objective="rate" if now.seconds_to_target is None else "time to target",
        learning_rate=rates,
        now=now,
        best=chosen,
        active=active,
        workers=by_count,
        lockstep=lockstep(observed.always, land.directions, replace(step, gradients=1.0), target),
        group=group,
        groups=groups,
        threshold=threshold,
        thresholds=found,
        follow=follow(now, step, rates, request.safety, (chosen, active), grouped, threshold),
        warnings=[
            *_warnings_of_inputs(observed, land, request, step, now),
            *_warnings_of_stability(request, step, now, chosen, rates, land.sharpest),
            *_warnings_of_absurdity(step, now, by_count[0]),
        ],
    )


def _calmer(direction: Direction, gradients: float) -> Direction:
    """As the mean of so many gradients sees it."""
    return direction if direction.noise is None else replace(direction, noise=direction.noise / gradients)


def _worthy(found: Outlook | None, now: Outlook, safety: float) -> Outlook | None:
    """All workers, unless fewer are worth it."""
    return now if found is not None and not is_worth_it(found, now, safety) else found


def _group(groups: dict[int, Outlook], now: Outlook, safety: float) -> int | None:
    found = best(groups.values(), safety)
    if found is None or not is_worth_it(found, now, safety):
        return None
    return next(size for size, one in groups.items() if one is found)


def _threshold(found: list[Threshold], safety: float) -> Threshold | None:
    chosen = best_threshold(found, safety)
    worth_it = chosen is not None and chosen.kept < 1 and is_worth_it(chosen, found[-1], safety)
    return chosen if worth_it else None


def _timing_facts(observed: Observed) -> Iterator[Fact]:
    crew, origin = observed.crew, observed.origin
    means = sorted(law.mean for law in crew.cycles)
    unlike = means[-1] > means[0] * 1.005
    shared: Origin = "given" if observed.shared_given else origin
    under = f"under {observed.protocol}"
    yield Fact("workers", len(crew.cycles), origin if observed.cycles else "given", observed.source)
    yield Fact("cycle, s", means[0], origin, f"the fastest; the slowest {means[-1]:.4g}" if unlike else "")
    yield Fact("store per push, s", crew.shared_s, shared)
    if observed.arrivals_per_s is not None:
        yield Fact("arrivals per s", observed.arrivals_per_s, origin, under)
    if observed.staleness is not None:
        yield Fact("mean staleness", observed.staleness, origin, f"{under}, in updates")
    if observed.triggered is not None:
        how: Origin = "given" if observed.triggered_given else origin
        yield Fact("pushed share", observed.triggered, how, "of the gradients that are computed (--trigger)")


def _step_facts(request: Request, observed: Observed, step: PolicyStep) -> Iterator[Fact]:
    if request.lr is not None:
        yield Fact("learning rate", request.lr, "given")
    else:
        yield Fact("learning rate", step.lr, "modelled", "none given: the safe one")
    yield Fact("momentum", step.momentum, "given")
    if request.weighting is not None:
        yield Fact("weighting", str(step.weighting), "given")
    elif observed.weighting is not None:
        yield Fact("weighting", str(step.weighting), "measured", "as in the run")
    else:
        yield Fact("weighting", str(step.weighting), "modelled", "the default of a run")
    if request.target_loss is not None:
        yield Fact("target loss", request.target_loss, "given", "above a lowest loss of 0 (modelled)")


def _warnings_of_inputs(
    observed: Observed, land: Landscape, request: Request, step: PolicyStep, now: Outlook
) -> Iterator[str]:
    if 0 < observed.cycles < ENOUGH_CYCLES:
        yield f"only {observed.cycles} iterations were recorded; {ENOUGH_CYCLES} give a steadier delay law."
    if observed.protocol == "asp" and observed.arrivals_per_s is not None:
        off = observed.arrivals_per_s / now.arrivals_per_s - 1
        if abs(off) > 0.1:
            yield f"the run saw {off:+.0%} arrivals against the model of its store; trust its own figure."
    if observed.triggered is not None and observed.triggered < 1:
        yield (
            f"a push is of {1 / observed.triggered:.3g} gradients, all on weights that are so much older: "
            "--trigger saves the link, and lowers the learning rate that is stable by that factor."
        )
    if request.target_loss is not None and now.seconds_to_target is None:
        yield "the time to target needs noise and loss: use --recipe, or --noise and --loss."
    if any(fact.origin == "measured" for fact in land.facts):
        yield "speeds and times are those of a bowl: of a network trust their ratios, not their size."
    if step.momentum:
        yield "momentum counts as a longer and later step, lr / (1 - momentum): an approximation."
        yield (
            "the theory is of one momentum for all pushes, as with --correct none: corrections, such as "
            "dana, which train uses by default, are not taken into account."
        )


def _warnings_of_stability(
    request: Request,
    step: PolicyStep,
    now: Outlook,
    chosen: Outlook | None,
    rates: LearningRates,
    sharpest: float,
) -> Iterator[str]:
    if not now.stable:
        yield f"the learning rate is above the bound {rates.critical:.3g} for all {now.workers} workers."
    if chosen is None:
        yield (
            f"no number of workers keeps within {request.safety:.0%} of the bound; with all of them "
            f"a learning rate up to {rates.safe:.3g} does."
        )
    if now.stable and request.target_loss is not None and (now.floor or 0.0) >= request.target_loss:
        yield f"the target is below the error floor {now.floor:.3g}; lower the learning rate in the end."
    step_curvature = step.length(now.workers) / (1 - step.momentum) * sharpest
    if now.stable and poisson_factor(now.floor_factor, step_curvature) == inf:
        yield "pushes at quite irregular times would let the variance grow without bound."


def _warnings_of_absurdity(step: PolicyStep, now: Outlook, alone: Outlook) -> Iterator[str]:
    if not alone.stable:
        yield (
            f"a learning rate of {step.lr:g} is unstable at any staleness: even for one worker, whose "
            f"gradients are fresh, it is {alone.margin:.3g} times the bound."
        )
    if now.load > FAR * now.critical:
        yield f"growth is given for {FAR:g} times the bound; beyond that it is even faster."
