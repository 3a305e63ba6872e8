"""How far the weights move: gradients alone, in flushes, weighted, scaled and damped. No process."""

from __future__ import annotations

from math import exp, sqrt
from typing import Any, cast

import pytest
import torch
from torch import nn

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.fabric.segment import Segment
from paceline.protocols.paced.hybrid_sgd import HybridSGD
from paceline.protocols.settings import make
from paceline.runtime.owner.after_step import AfterSteps
from paceline.runtime.owner.apply import VerdictApplier
from paceline.runtime.run.member import Member
from paceline.runtime.run.run import Run
from paceline.store.layout import describe
from paceline.store.ledger import Ledger
from paceline.store.optimizers import describe_optimizer
from paceline.store.parameters import Gradients, ParameterStore

WORKERS, PUSHES = 4, 48
WAYS: list[dict[str, Any]] = [
    {"reduce": "sum"},
    {"reduce": "mean", "lr_scale": "none"},
    {"reduce": "mean", "lr_scale": "sqrt_K"},
    {"reduce": "mean"},
]


class Books:
    """A store with one number in it, and workers that push numbers; everything else is the real run's."""

    def __init__(self, protocol: str, settings: dict[str, Any], workers: int = WORKERS, **dials: Any) -> None:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        correct = dials.get("correct", "none")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0 if correct == "none" else 0.5)
        layout = describe(model, list(model.parameters()))
        spec = describe_optimizer(optimizer, {id(model.weight): 0})
        weights = Segment.create(layout.weights_bytes, "weights")
        config = RunConfig(run="", folder="", workers=workers, **dials)
        ledger = Ledger(config, protocol, make(protocol, settings), lambda event: None)
        self.run = Run(ledger, ParameterStore(layout, spec, weights.bytes), weights, shared=False)
        self.run.store.correct(correct)
        self.members = {
            rank: self._member(rank, [g.settings for g in spec.groups]) for rank in range(workers)
        }
        self._applier = VerdictApplier(config, self.run, self.members, AfterSteps(cast(Any, self)))

    def _member(self, rank: int, settings: list[dict[str, Any]]) -> Member:
        member, layout = Member(rank, None, 0), self.run.store.layout  # type: ignore[arg-type]
        member.gradients = Gradients(layout, torch.zeros(layout.segment_bytes, dtype=torch.uint8))
        member.settings, member.samples, member.finite = settings, 1, True
        self.run.ledger.pacer.join(rank, 0.0)
        return member

    def push(self, rank: int, gradient: float = 1.0) -> None:
        pushed = self.members[rank].pushed
        pushed.views[0].fill_(gradient)
        decision = self.run.ledger.pacer.push(rank, 0.0)
        self._applier.carry_out(decision)
        for released in decision.release:
            self.run.held.set_aside(released)

    def leave(self, rank: int) -> None:
        self._applier.carry_out(self.run.ledger.pacer.leave(rank, 0.0))

    @property
    def moved(self) -> float:
        return -float(self.run.store.views[0])


def moved(pushes: int, settings: dict[str, Any], **dials: Any) -> float:
    """By how much so many gradients of 1 have moved the weights, at rate 1, pushed in turn."""
    books = Books("hybrid_sgd", {"threshold": "constant"} | settings, **dials)
    for number in range(pushes):
        books.push(number % WORKERS)
    return books.moved


@pytest.mark.parametrize("wait", ["in_buffer", "never"])
@pytest.mark.parametrize(("weighting", "each"), [("mean", 1 / WORKERS), ("sum", 1.0), (0.5, 0.5)])
@pytest.mark.parametrize("threshold", [1, 2, 4])
def test_a_sum_counts_every_gradient_as_asp_does_and_a_mean_a_kth_of_that(
    threshold: int, weighting: Any, each: float, wait: str
) -> None:
    """At every threshold and weighting: sum, mean, mean scaled by sqrt(K), mean scaled by K."""
    far = [moved(PUSHES, {"first": threshold, "wait": wait} | way, weighting=weighting) for way in WAYS]
    alone = PUSHES * each
    assert far == pytest.approx([alone, alone / threshold, alone / sqrt(threshold), alone], rel=1e-12)


def test_the_step_per_gradient_does_not_jump_when_the_threshold_passes_one() -> None:
    """The threshold rises from 1 to 4 within the run; what is left in the buffer has not moved anything."""
    books = Books("hybrid_sgd", {"threshold": "step", "h": 6, "reduce": "sum"})
    for number in range(PUSHES):
        books.push(number % WORKERS)
    left = books.run.ledger.pacer.clocks.held
    assert left < WORKERS
    assert books.moved == pytest.approx((PUSHES - left) / WORKERS)


def test_a_sum_at_all_workers_is_a_mean_at_that_many_times_the_rate() -> None:
    """Invariant 7 of the paper's sheet, gradient by gradient."""
    books = [Books("hybrid_sgd", {"threshold": "constant", "first": 4} | way) for way in WAYS[:2]]
    for rank in range(WORKERS):
        for each in books:
            each.push(rank, gradient=rank + 1.0)
    assert books[0].moved == pytest.approx(WORKERS * books[1].moved) == pytest.approx((1 + 2 + 3 + 4) / 4)


def test_at_all_workers_a_sum_is_still_clipped_as_a_sum() -> None:
    """Four gradients of 1: their sum is cut from 4 to 1, their mean is 1 already."""
    for way, far in ((WAYS[0], 1 / WORKERS), (WAYS[3], 1.0)):
        books = Books("hybrid_sgd", {"threshold": "constant", "first": 4} | way, clip_norm=1.0)
        for rank in range(WORKERS):
            books.push(rank)
        assert books.moved == pytest.approx(far, rel=1e-5)


@pytest.mark.parametrize(("weighting", "far"), [("mean", 1.0), ("sum", 1.0), (0.5, 0.5)])
def test_who_had_no_batch_in_a_last_round_makes_the_others_count_no_more(weighting: Any, far: float) -> None:
    books = Books("bsp", {}, weighting=weighting)
    for rank in range(WORKERS):
        books.members[rank].samples = int(rank == 0)
        books.push(rank, gradient=float(rank == 0))
    assert books.moved == pytest.approx(far)


@pytest.mark.parametrize("scale", ["none", "sqrt_K"])
def test_a_sum_is_not_scaled(scale: Any) -> None:
    with pytest.raises(ConfigError, match=f"lr_scale={scale} scales a mean"):
        HybridSGD(reduce="sum", lr_scale=scale)


DAMPINGS = [
    ("none", lambda stale: 1.0),
    ("inverse", lambda stale: 1 / max(1, stale)),
    ("sqrt", lambda stale: 1 / sqrt(max(1, stale))),
    ("exponential", lambda stale: exp(-stale / WORKERS) if stale > 1 else 1.0),
]


@pytest.mark.parametrize(("damping", "left"), DAMPINGS, ids=[name for name, _ in DAMPINGS])
def test_a_gradient_applied_at_once_keeps_the_share_that_its_staleness_leaves_it(
    damping: str, left: Any
) -> None:
    """Ranks 0 to 2 push in turn, then rank 3 with what it read at the beginning."""
    books = Books("asp", {}, damping=damping, weighting="sum")
    for rank in [0, 1, 2] * 3:
        books.push(rank)
    before = books.moved
    books.push(3)
    assert books.moved - before == pytest.approx(left(9))


@pytest.mark.parametrize(("damping", "left"), DAMPINGS, ids=[name for name, _ in DAMPINGS])
@pytest.mark.parametrize("way", WAYS[:2], ids=["sum", "mean"])
def test_a_stale_gradient_in_a_flush_is_damped_and_the_others_count_as_before(
    damping: str, left: Any, way: dict[str, Any]
) -> None:
    """Ranks 0 and 1 make four steps of two; the fifth has rank 3's, four steps old, and a fresh one."""
    settings = {"threshold": "constant", "first": 2} | way
    books = Books("hybrid_sgd", settings, damping=damping, weighting="sum")
    for rank in [0, 1] * 4:
        books.push(rank)
    before = books.moved
    books.push(3)
    assert books.moved == before
    books.push(0)
    assert books.moved - before == pytest.approx((left(4) + 1.0) / (1 if way["reduce"] == "sum" else 2))


def test_a_held_gradient_is_as_stale_as_it_is_when_it_is_applied() -> None:
    """Two late gradients are applied while rank 0's is held: it is two steps old when its round ends."""
    books = Books("backup_bsp", {"backups": 2, "late": "apply"}, damping="inverse", weighting="sum")
    for rank in (0, 1, 0, 2, 3, 1):
        books.push(rank)
    first, late, second = 2.0, 1.0 + 1 / 2, 2 * 1 / 2
    assert books.run.ledger.pacer.clocks.version == 4
    assert books.moved == pytest.approx(first + late + second)


@pytest.mark.parametrize("damping", ["inverse", "sqrt", "exponential"])
def test_a_gradient_that_missed_one_step_is_not_damped_and_one_that_missed_two_is(damping: str) -> None:
    books = Books("asp", {}, damping=damping, weighting="sum")
    for rank in (0, 1, 2):
        books.push(rank)
    left = dict(DAMPINGS)[damping](2)
    assert left < 1
    assert books.moved == pytest.approx(1.0 + 1.0 + left)


def test_exponential_damping_counts_the_workers_that_are_there_now() -> None:
    books = Books("asp", {}, damping="exponential", weighting="sum")
    for rank in [0, 1] * 2:
        books.push(rank)
    books.leave(0)
    books.leave(1)
    before = books.moved
    books.push(3)
    assert books.moved - before == pytest.approx(exp(-4 / 2))


@pytest.mark.parametrize(("damping", "left"), DAMPINGS, ids=[name for name, _ in DAMPINGS])
def test_a_corrected_gradient_applied_at_once_is_damped_as_well(damping: str, left: Any) -> None:
    """Rank 3 has no momentum of its own yet, so its step is its gradient."""
    books = Books("asp", {}, damping=damping, weighting="sum", correct="dana")
    for rank in [0, 1, 2] * 3:
        books.push(rank)
    before = books.moved
    books.push(3)
    assert books.moved - before == pytest.approx(left(9))


@pytest.mark.parametrize(("damping", "left"), DAMPINGS, ids=[name for name, _ in DAMPINGS])
def test_a_corrected_gradient_in_a_flush_is_damped_as_well(damping: str, left: Any) -> None:
    """Against the same pushes undamped: of the last flush only rank 3's part is smaller."""

    def far(damping: str) -> float:
        settings = {"threshold": "constant", "first": 2, "reduce": "sum"}
        books = Books("hybrid_sgd", settings, damping=damping, weighting="sum", correct="dana")
        for rank in [0, 1, 0, 1, 0, 1, 0, 1, 3, 0]:
            books.push(rank)
        return books.moved

    assert far("none") - far(damping) == pytest.approx(1.0 - left(4))


@pytest.mark.parametrize("correct", ["none", "dana", "gap"])
def test_a_gradient_dropped_for_its_staleness_moves_nothing(correct: str) -> None:
    books = Books("asp", {}, drop_staler=1, weighting="sum", correct=correct)
    for rank in (0, 1):
        books.push(rank)
    before = books.moved
    books.push(2)  # it has missed two steps
    assert books.moved == before
    books.push(2)  # and has read anew since
    assert books.moved > before


@pytest.mark.parametrize("correct", ["none", "dana"])
@pytest.mark.parametrize(("cap", "rate"), [(None, 1.0), (0.25, 0.25), (4.0, 1.0)])
def test_the_rate_of_a_step_is_the_smaller_of_the_scripts_and_the_cap(
    cap: float | None, rate: float, correct: str
) -> None:
    books = Books("asp", {}, weighting="sum", correct=correct, lr_cap=cap)
    books.push(0)
    assert books.moved == pytest.approx(rate)


def test_a_flush_is_capped_as_well() -> None:
    assert moved(4, {"first": 4}, lr_cap=0.5) == pytest.approx(0.5)
