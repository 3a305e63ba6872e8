"""DeepSpark: asynchronous elastic averaging whose period follows the training loss."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.core.operations import CENTRE
from paceline.protocols.peer.easgd import EASGD
from support.peers import Crew
from support.problems import SIZE, large_batch, noisy, nothing

close = torch.testing.assert_close
START = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
seeds = st.integers(0, 50)


def deepspark(period: int = 3, **settings: float) -> EASGD:
    return EASGD(period=period, mode="asynchronous", adaptive=True, **settings)  # type: ignore[arg-type]


def with_losses(
    protocol: EASGD, workers: int, loss: Callable[[int, int], float | None], seed: int = 0, **crew: object
) -> Crew:
    """A crew whose scripts report a loss, by rank and iteration (from 1), before they step."""
    gradient = crew.pop("gradient", noisy(seed))

    def reports(rank: int, iteration: int, x: Tensor) -> Tensor:
        made.workers[rank].me.loss = loss(rank, iteration + 1)
        return gradient(rank, iteration, x)  # type: ignore[operator]

    made = Crew(protocol, workers, reports, seed=seed, **crew)  # type: ignore[arg-type]
    return made


def exchanges(crew: Crew, rank: int = 0) -> list[int]:
    """After which iterations (from 1) a rank exchanged."""
    return [iteration + 1 for who, iteration, what in crew.log if who == rank and what == "Exchange"]


@given(period=st.integers(1, 6), loss=st.floats(0.01, 10))
def test_with_constant_loss_an_exchange_comes_after_a_period_and_one(period: int, loss: float) -> None:
    """Strictly more than the threshold: the authors' `>`."""
    crew = with_losses(deepspark(period), 1, lambda rank, t: loss if t <= 40 else 0.0).run(40)
    assert exchanges(crew)[:3] == [period, 2 * period + 1, 3 * period + 2]


@given(period=st.integers(2, 6))
def test_with_the_loss_halved_the_period_doubles(period: int) -> None:
    crew = with_losses(deepspark(period), 1, lambda rank, t: 1.0 if t <= period else 0.5).run(8 * period)
    gaps = [b - a for a, b in pairwise(exchanges(crew))]
    assert gaps
    assert set(gaps) == {2 * period + 1}


@given(p=st.integers(2, 6))
def test_recalibrated_after_two_exchanges_the_period_is_that_of_the_loss_there_is_now(p: int) -> None:
    """Twice as long with half of the loss, until the threshold is set anew, and again after two more."""
    crew = with_losses(deepspark(p, recalibrate=2), 1, lambda rank, t: 1.0 if t <= p else 0.5).run(9 * p)
    assert exchanges(crew)[:6] == [p, 3 * p + 1, 4 * p + 1, 5 * p + 2, 6 * p + 2, 7 * p + 3]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"adaptive": True, "recalibrate": -1}, "got -1"),
        ({"recalibrate": 2}, "adaptive=false"),
        ({"adaptive": True, "recalibrate": 2, "shortest": 20}, "within shortest=20"),
        ({"adaptive": True, "recalibrate": 2, "longest": 5}, "longest=5"),
    ],
)
def test_a_recalibration_that_cannot_be_is_refused(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EASGD(mode="asynchronous", **settings)


def test_a_worker_whose_loss_rises_talks_more_often() -> None:
    crew = with_losses(deepspark(4), 2, lambda rank, t: 3.0 if rank and t > 4 else 1.0).run(24)
    assert exchanges(crew, 0) == [4, 9, 14, 19, 24]
    assert exchanges(crew, 1) == [4, *range(6, 25, 2)]


@given(period=st.integers(1, 4), longest=st.integers(4, 9), loss=st.floats(-1, 1e-3))
def test_no_two_exchanges_are_further_apart_than_the_longest(period: int, longest: int, loss: float) -> None:
    protocol = deepspark(period, longest=longest)
    crew = with_losses(protocol, 1, lambda rank, t: 1.0 if t <= period else loss).run(60)
    found = exchanges(crew)
    assert all(b - a <= longest for a, b in pairwise(found))
    assert 60 - found[-1] < longest


def test_no_two_exchanges_are_closer_than_the_shortest() -> None:
    protocol = deepspark(2, shortest=5)
    crew = with_losses(protocol, 1, lambda rank, t: 1.0 if t <= 2 else 100.0).run(20)
    assert exchanges(crew) == [2, 7, 12, 17]


@given(workers=st.integers(1, 5), seed=seeds, beta=st.floats(0, 1))
def test_replicas_and_centre_together_change_by_gradients_only(workers: int, seed: int, beta: float) -> None:
    total = torch.zeros(SIZE, dtype=torch.float64)

    def counted(rank: int, iteration: int, x: Tensor) -> Tensor:
        value = noisy(seed)(rank, iteration, x)
        total.add_(value)
        return value

    crew = with_losses(deepspark(2, beta=beta), workers, lambda rank, t: 1 + rank / t, seed, gradient=counted)
    crew.run(11).settle()
    together = torch.stack(crew.parameters()).sum(0) + crew.cells[CENTRE][0]
    close(together, (workers + 1) * START - 0.1 * total)


@given(beta=st.floats(0.05, 1))
def test_one_exchange_shrinks_the_gap_as_the_theory_says(beta: float) -> None:
    """x' - c' = (1 - 2 alpha)(x - c); with alpha 1/2 both become the mean, with alpha 1 they swap."""
    crew = with_losses(
        deepspark(1, beta=beta), 1, lambda rank, t: 1.0, gradient=lambda *_: torch.ones(SIZE).double()
    )
    x = START - 0.1
    crew.run(1)
    close(crew.parameters()[0] - crew.cells[CENTRE][0], (1 - 2 * beta) * (x - START))
    close(crew.parameters()[0] + crew.cells[CENTRE][0], x + START)


@given(workers=st.integers(1, 4), seed=seeds)
def test_with_beta_zero_all_are_alone_and_the_centre_is_frozen(workers: int, seed: int) -> None:
    crew = with_losses(deepspark(2, beta=0.0), workers, lambda rank, t: 1.0, seed).run(6)
    for rank, x in enumerate(crew.parameters()):
        close(x, large_batch(1, 6, lambda _, i, at, rank=rank: noisy(seed)(rank, i, at)))
    close(crew.cells[CENTRE][0], START)


@given(workers=st.integers(1, 5), seed=seeds, beta=st.floats(0, 1))
def test_without_gradients_all_stay_within_the_values_they_began_with(
    workers: int, seed: int, beta: float
) -> None:
    def scattered(rank: int) -> Tensor:
        return START * (rank + 1)

    crew = with_losses(
        deepspark(1, beta=beta), workers, lambda rank, t: 1.0, seed, gradient=nothing, initial=scattered
    )
    before = torch.stack([*crew.parameters(), crew.cells[CENTRE][0]])
    after = crew.run(7)
    for x in [*after.parameters(), after.cells[CENTRE][0]]:
        assert (x >= before.min(0).values - 1e-12).all()
        assert (x <= before.max(0).values + 1e-12).all()


def test_what_is_left_at_the_end_is_exchanged_then() -> None:
    crew = with_losses(deepspark(4), 1, lambda rank, t: 1.0).run(6)
    assert exchanges(crew) == [4]
    crew.settle()
    assert crew.counts["exchange"] == 2
    crew = with_losses(deepspark(4), 1, lambda rank, t: 1.0).run(9).settle()
    assert crew.counts["exchange"] == 2


def test_nobody_waits_for_anybody() -> None:
    crew = with_losses(deepspark(1), 2, lambda rank, t: 1.0)
    crew.workers[0].goal = 5
    while crew.workers[0].runnable:
        crew.workers[0].turn()
    assert [worker.me.count for worker in crew.workers] == [5, 0]


def test_a_loss_reported_after_the_step_calibrates_to_the_same_threshold() -> None:
    late = with_losses(deepspark(4), 1, lambda rank, t: None if t == 1 else 1.0).run(20)
    assert exchanges(late) == exchanges(with_losses(deepspark(4), 1, lambda rank, t: 1.0).run(20))


def test_without_any_loss_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"goes by the training loss.*pace\.report"):
        with_losses(deepspark(3), 1, lambda rank, t: None).run(4)


def test_an_adaptive_period_in_lockstep_is_refused() -> None:
    with pytest.raises(ConfigError, match="mode=asynchronous"):
        EASGD(adaptive=True)


@pytest.mark.parametrize("clamps", [{"shortest": 0}, {"shortest": 5, "longest": 4}])
def test_clamps_that_leave_nothing_between_them_are_refused(clamps: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="shortest <= longest"):
        deepspark(3, **clamps)


# A moving rate given directly, its decay, the server's factor.

rates = st.floats(0.01, 1)


def spring(period: int = 1, **settings: float) -> EASGD:
    return EASGD(period=period, mode="asynchronous", **settings)  # type: ignore[arg-type]


@given(alpha=rates, share=rates)
def test_with_a_server_factor_the_gap_shrinks_to_one_minus_alpha_minus_alpha_s(
    alpha: float, share: float
) -> None:
    protocol = deepspark(1, alpha=alpha, server_factor=share / alpha)
    crew = with_losses(protocol, 1, lambda rank, t: 1.0, gradient=lambda *_: torch.ones(SIZE).double())
    x = START - 0.1
    crew.run(1)
    replica, centre = crew.parameters()[0], crew.cells[CENTRE][0]
    close(replica, (1 - alpha) * x + alpha * START)
    close(centre, (1 - share) * START + share * x)
    close(replica - centre, (1 - alpha - share) * (x - START))


@given(workers=st.integers(1, 4), seed=seeds, alpha=rates, share=rates)
def test_with_a_server_factor_all_stay_within_the_values_they_began_with(
    workers: int, seed: int, alpha: float, share: float
) -> None:
    protocol = spring(alpha=alpha, server_factor=share / alpha)
    crew = Crew(protocol, workers, nothing, seed=seed, initial=lambda rank: START * (rank + 1))
    low, high = START.minimum(START * workers), START.maximum(START * workers)
    crew.run(5)
    for x in [*crew.parameters(), crew.cells[CENTRE][0]]:
        assert (x >= low - 1e-12).all()
        assert (x <= high + 1e-12).all()


@given(
    seed=seeds, alpha=rates, rate=rates, step=st.integers(1, 5), limit=st.integers(0, 3), own=st.booleans()
)
def test_alpha_and_factor_decay_every_so_many_iterations_up_to_the_limit(
    seed: int, alpha: float, rate: float, step: int, limit: int, own: bool
) -> None:
    """An independent loop over plain tensors; `own`: alpha decays, else the server's factor."""
    name = "decay" if own else "factor_decay"
    dials = {f"{name}_rate": rate, f"{name}_step": step, f"{name}_limit": limit}
    crew = Crew(spring(2, alpha=alpha, **dials), 1, noisy(seed)).run(12)
    x, centre, a, s, decays = START.clone(), START.clone(), alpha, 1.0, 0
    for t in range(12):
        if t and t % step == 0 and (not limit or decays < limit):
            decays += 1
            a, s = (a * rate, s) if own else (a, s * rate)
        gap = (x - centre) if t % 2 == 0 else torch.zeros(SIZE)
        x = x - 0.1 * noisy(seed)(0, t, x) - a * gap
        centre = centre + a * s * gap
    close(crew.parameters()[0], x)
    close(crew.cells[CENTRE][0], centre)


@given(workers=st.integers(1, 5), seed=seeds, beta=st.floats(0, 1))
def test_in_step_a_direct_alpha_is_a_beta_of_workers_times_as_much(
    workers: int, seed: int, beta: float
) -> None:
    one = Crew(EASGD(period=2, beta=beta), workers, noisy(seed), seed=seed).run(6)
    other = Crew(EASGD(period=2, alpha=beta / workers), workers, noisy(seed), seed=seed).run(6)
    close(other.parameters(), one.parameters())
    close(other.models()[0], one.models()[0])


def test_workers_times_alpha_above_one_is_warned_of_and_one_is_not() -> None:
    (text,) = spring(alpha=0.26).remarks(4)
    assert "4 workers x alpha 0.26" in text
    assert "Use alpha <= 0.25" in text
    assert spring(alpha=0.25).remarks(4) == EASGD(beta=1.0).remarks(99) == []
    assert spring(alpha=0.25, server_factor=1.5).remarks(4)


# Downpour, the baseline.


@given(workers=st.integers(1, 4), period=st.integers(1, 4), iterations=st.integers(1, 9), seed=seeds)
def test_under_downpour_the_centre_is_the_start_plus_all_that_workers_moved_by(
    workers: int, period: int, iterations: int, seed: int
) -> None:
    total = torch.zeros(SIZE, dtype=torch.float64)

    def counted(rank: int, iteration: int, x: Tensor) -> Tensor:
        value = noisy(seed)(rank, iteration, x)
        total.add_(value)
        return value

    protocol = EASGD(period=period, mode="downpour")
    crew = Crew(protocol, workers, counted, seed=seed).run(iterations).settle()
    close(crew.models()[0], START - 0.1 * total)
    assert crew.counts["exchange"] == workers * -(-iterations // period)


@given(period=st.integers(1, 4), seed=seeds)
def test_under_downpour_one_worker_is_plain_sgd_and_all_adopt_the_centre(period: int, seed: int) -> None:
    alone = Crew(EASGD(period=period, mode="downpour"), 1, noisy(seed)).run(7)
    close(alone.parameters()[0], large_batch(1, 7, noisy(seed)))
    crew = Crew(EASGD(period=period, mode="downpour"), 3, noisy(seed), seed=seed).run(period)
    assert any(torch.equal(x, crew.models()[0]) for x in crew.parameters())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"alpha": -0.1}, "alpha=-0.1"),
        ({"alpha": 1.1}, "alpha=1.1"),
        ({"alpha": 0.6, "server_factor": 2.0}, "overshoots"),
        ({"alpha": 0.0, "server_factor": float("inf")}, "overshoots"),
        ({"server_factor": 0.0}, "server_factor > 0"),
        ({"decay_rate": 0.5}, "needs decay_step"),
        ({"decay_rate": 1.5, "decay_step": 2}, "got 1.5"),
        ({"factor_decay_step": -1}, "got 1, -1"),
        ({"mode": "synchronous", "server_factor": 0.5}, "mode=asynchronous"),
        ({"mode": "downpour", "alpha": 0.1}, "no spring"),
    ],
)
def test_rates_that_cannot_work_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EASGD(**{"mode": "asynchronous", **settings})  # type: ignore[arg-type]


def test_the_shortest_may_be_one_and_the_longest() -> None:
    assert deepspark(2, shortest=1, longest=1).shortest == 1
