"""SelSync: when to synchronise is decided together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.peer.selsync import SelSync
from paceline.protocols.settings import make_any
from support.peers import Crew
from support.problems import Gradient, MakeOptimizer, adam, large_batch, momentum, noisy, sgd

close = torch.testing.assert_close
seeds = st.integers(0, 99)
deltas = st.sampled_from([0.0, 0.02, 0.1, 0.3, 1e9, float("inf")])


def synchronised(crew: Crew, iterations: int) -> list[int]:
    """The iterations, from 1, in which all came together."""
    seen = []
    for iteration in range(1, iterations + 1):
        before = crew.counts["average"]
        crew.run(1)
        if crew.counts["average"] > before:
            seen.append(iteration)
    return seen


@pytest.mark.parametrize("optimizer", [sgd, momentum])
@given(workers=st.integers(1, 5), seed=seeds)
def test_a_delta_of_zero_is_bsp(optimizer: MakeOptimizer, workers: int, seed: int) -> None:
    crew = Crew(SelSync(delta=0.0, window=2), workers, noisy(seed), seed=seed, optimizer=optimizer).run(9)
    close(crew.parameters()[0], large_batch(workers, 9, noisy(seed), optimizer))
    assert crew.counts["average"] == 9


def test_a_delta_of_zero_is_not_bsp_for_adam() -> None:
    crew = Crew(SelSync(delta=0.0), 3, noisy(3), optimizer=adam).run(5)
    assert not torch.allclose(crew.parameters()[0], large_batch(3, 5, noisy(3), adam))


@given(workers=st.integers(2, 5), seed=seeds, delta=deltas, window=st.integers(1, 4))
def test_all_workers_take_the_same_branch_at_every_step(
    workers: int, seed: int, delta: float, window: int
) -> None:
    crew = Crew(SelSync(delta=delta, window=window), workers, noisy(seed), seed=seed).run(12)
    branches = [[(i, name) for rank, i, name in crew.log if rank == each] for each in range(workers)]
    assert all(branch == branches[0] for branch in branches)


@given(seed=seeds, window=st.integers(1, 5))
def test_until_the_window_is_full_every_step_synchronises_and_none_later_if_delta_is_infinite(
    seed: int, window: int
) -> None:
    protocol = make_any("selsync", {"delta": "inf", "window": window})
    assert isinstance(protocol, SelSync)
    crew = Crew(protocol, 3, noisy(seed), seed=seed)
    assert synchronised(crew, 10) == list(range(1, window + 1))
    assert not crew.equal()


@given(seed=seeds, delta=st.sampled_from([0.02, 0.1, 0.3]))
def test_a_step_synchronises_exactly_if_somebodys_change_is_delta_or_more(seed: int, delta: float) -> None:
    """Changes are counted here by hand, from the gradients."""
    norms: list[list[float]] = [[], [], []]

    def watched(rank: int, iteration: int, x: Tensor) -> Tensor:
        gradient = noisy(seed)(rank, iteration, x)
        norms[rank].append(float(gradient @ gradient))
        return gradient

    crew = Crew(SelSync(delta=delta, window=3, smoothing=0.0), 3, watched, seed=seed)
    seen = synchronised(crew, 15)
    due = []
    for step in range(1, 16):
        means = [(sum(own[step - 3 : step]) / 3, sum(own[step - 4 : step - 1]) / 3) for own in norms]
        if step <= 3 or max(abs(now - before) / before for now, before in means) >= delta:
            due.append(step)
    assert seen == due


@given(seed=seeds)
def test_a_larger_delta_synchronises_at_a_subset_of_the_steps_on_the_same_gradients(seed: int) -> None:
    def given_in_advance(rank: int, iteration: int, x: Tensor) -> Tensor:
        return noisy(seed)(rank, iteration, torch.zeros_like(x))

    steps = [
        set(synchronised(Crew(SelSync(delta=delta, window=2), 2, given_in_advance), 20))
        for delta in (0.0, 0.1, 0.4, 5.0)
    ]
    assert steps[0] >= steps[1] >= steps[2] >= steps[3]


@given(seed=seeds, scale=st.sampled_from([1e-3, 8.0, 1e5]))
def test_scaling_the_loss_changes_no_decision(seed: int, scale: float) -> None:
    def scaled(by: float) -> Gradient:
        return lambda rank, i, x: by * noisy(seed)(rank, i, torch.zeros_like(x))

    one, other = (Crew(SelSync(delta=0.1, window=2), 3, scaled(by)) for by in (1.0, scale))
    assert synchronised(one, 12) == synchronised(other, 12)


def test_a_constant_gradient_synchronises_during_the_warm_up_only() -> None:
    crew = Crew(SelSync(delta=0.01, window=4, smoothing=0.2), 2, lambda rank, i, x: torch.ones_like(x))
    assert synchronised(crew, 10) == [1, 2, 3, 4]


def test_gradients_of_zero_divide_nothing_by_zero() -> None:
    crew = Crew(SelSync(delta=0.01, window=2), 2, lambda rank, i, x: torch.zeros_like(x))
    assert synchronised(crew, 6) == [1, 2]


@given(seed=seeds)
def test_after_a_parameter_synchronisation_replicas_are_equal_bit_for_bit(seed: int) -> None:
    crew = Crew(SelSync(delta=0.15, window=2), 3, noisy(seed), seed=seed)
    for _ in range(12):
        before = crew.counts["average"]
        crew.run(1)
        if crew.counts["average"] > before:
            assert crew.equal()


@given(seed=seeds)
def test_averaged_gradients_leave_the_differences_between_replicas_as_they_were(seed: int) -> None:
    protocol = SelSync(delta=0.1, window=1, aggregation="gradients")
    crew = Crew(protocol, 2, noisy(seed), seed=seed)
    for _ in range(12):
        (a, b), count = crew.parameters(), crew.counts["average"]
        crew.run(1)
        after = crew.parameters()
        if crew.counts["average"] > count:
            close(after[0] - after[1], a - b)


@given(seed=seeds, delta=deltas)
def test_one_worker_is_plain_sgd_for_every_delta(seed: int, delta: float) -> None:
    crew = Crew(SelSync(delta=delta, window=2), 1, noisy(seed), optimizer=momentum).run(8)
    close(crew.parameters()[0], large_batch(1, 8, noisy(seed), momentum))


def test_smoothing_counts_the_newest_most_and_leaves_a_constant_alone() -> None:
    assert SelSync(smoothing=0.3).smooth([5.0] * 4) == pytest.approx(5.0)
    assert SelSync(smoothing=0.0).smooth([1.0, 2.0, 6.0]) == pytest.approx(3.0)
    weights = [0.5**3, 0.5**2, 0.5]
    assert SelSync(smoothing=0.5).smooth([1.0, 2.0, 6.0]) == pytest.approx(
        sum(w * x for w, x in zip(weights, [1, 2, 6], strict=True)) / sum(weights)
    )


def test_a_norm_that_is_not_finite_asks_for_a_synchronisation_and_is_not_remembered() -> None:
    def spiky(rank: int, iteration: int, x: Tensor) -> Tensor:
        return torch.full_like(x, 1e300 if (rank, iteration) == (1, 5) else 1.0)

    crew = Crew(SelSync(delta=0.01, window=2, aggregation="gradients"), 2, spiky)
    assert synchronised(crew, 9) == [1, 2, 6]


@given(seed=seeds, delta=deltas, workers=st.integers(1, 4))
def test_the_told_lssr_is_the_share_of_local_steps_on_every_worker(
    seed: int, delta: float, workers: int
) -> None:
    crew = Crew(SelSync(delta=delta, window=2), workers, noisy(seed), seed=seed)
    together = synchronised(crew, 12)
    assert [worker.me.told["lssr"] for worker in crew.workers] == [(12 - len(together)) / 12] * workers


@given(seed=seeds, window=st.integers(1, 4), delta=st.sampled_from([0.02, 0.1, 0.3]))
def test_smoothed_changes_are_the_window_mean_of_changes(seed: int, window: int, delta: float) -> None:
    norms: list[float] = []

    def watched(rank: int, iteration: int, x: Tensor) -> Tensor:
        gradient = noisy(seed)(rank, iteration, x)
        norms.append(float(gradient @ gradient))
        return gradient

    protocol = SelSync(delta=delta, window=window, smoothing=0.0, smooth_delta=True)
    seen, due, steps = synchronised(Crew(protocol, 1, watched), 16), [], range(1, 17)
    means = {t: sum(norms[t - window : t]) / window for t in steps if t >= window}
    changes = {t: abs(means[t] - means[t - 1]) / means[t - 1] for t in steps if t > window}
    for t in steps:
        recent = [changes[u] for u in range(t - window + 1, t + 1) if u in changes]
        if len(recent) < window or sum(recent) / window >= delta:
            due.append(t)
    assert seen == due
    assert seen[: 2 * window - 1] == list(range(1, 2 * window))


@pytest.mark.parametrize("aggregation", ["parameters", "gradients"])
@given(seed=seeds)
def test_with_the_optimizers_state_synchronised_all_remember_the_same(aggregation: Any, seed: int) -> None:
    """Infinite delta: two steps together, then all alone with one momentum, then apart in both."""
    protocol = SelSync(delta=float("inf"), window=2, aggregation=aggregation, sync_optimizer_state=True)
    crew = Crew(protocol, 3, noisy(seed), seed=seed, optimizer=momentum).run(2)
    assert all(torch.equal(remembered(crew, 0), remembered(crew, rank)) for rank in (1, 2))
    crew.run(1)
    assert not torch.equal(remembered(crew, 0), remembered(crew, 1))


@given(seed=seeds)
def test_a_delta_of_zero_with_synchronised_momentum_is_still_bsp(seed: int) -> None:
    protocol = SelSync(delta=0.0, window=2, sync_optimizer_state=True)
    crew = Crew(protocol, 3, noisy(seed), seed=seed, optimizer=momentum).run(6)
    close(crew.parameters()[0], large_batch(3, 6, noisy(seed), momentum))
    assert crew.counts["average"] == 2 * 6


def buffers(crew: Crew) -> list[float]:
    return [float(worker.buffers[0][0]) for worker in crew.workers]


def test_float_buffers_are_averaged_with_the_parameters_and_in_no_other_step() -> None:
    """Window 1, constant gradients: the first step synchronises, and none later."""
    crew = Crew(
        SelSync(delta=0.01, window=1),
        3,
        lambda rank, i, x: torch.ones_like(x),
        buffers=lambda rank: torch.full((2,), float(rank * rank), dtype=torch.float64),
    )
    crew.run(1)
    assert buffers(crew) == pytest.approx([5 / 3] * 3)
    for worker in crew.workers:
        worker.buffers[0].fill_(float(worker.me.rank))
    crew.run(3)
    assert buffers(crew) == [0.0, 1.0, 2.0]


def test_averaged_gradients_leave_float_buffers_to_their_workers() -> None:
    crew = Crew(
        SelSync(delta=0.0, window=1, aggregation="gradients"),
        3,
        noisy(1),
        buffers=lambda rank: torch.full((2,), float(rank), dtype=torch.float64),
    )
    assert buffers(crew.run(4)) == [0.0, 1.0, 2.0]


def remembered(crew: Crew, rank: int) -> Tensor:
    """A worker's momentum."""
    worker = crew.workers[rank]
    return torch.cat([worker.optimizer.state[view]["momentum_buffer"] for view in worker.views])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delta": -1.0}, "got -1"),
        ({"delta": float("nan")}, "nan"),
        ({"window": 0}, "got 0"),
        ({"smoothing": 1.0}, "1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SelSync(**settings)
