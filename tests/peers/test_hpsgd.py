"""HPSGD: averages that travel while the next round is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.peer.hpsgd import HPSGD, rate_factor
from paceline.protocols.peer.local_sgd import LocalSGD
from support.peers import Crew
from support.problems import SIZE, Gradient, MakeOptimizer, adam, large_batch, momentum, noisy, sgd

close = torch.testing.assert_close
seeds = st.integers(0, 99)
lengths = st.sampled_from([0, 1, 2, 3, 5])


class Counted:
    """Adds up every gradient that anybody computed."""

    def __init__(self, gradient: Gradient) -> None:
        self.gradient, self.total = gradient, torch.zeros(SIZE, dtype=torch.float64)

    def __call__(self, rank: int, iteration: int, x: Tensor) -> Tensor:
        value = self.gradient(rank, iteration, x)
        self.total += value
        return value


@given(workers=st.integers(1, 5), seed=seeds, length=lengths, iterations=st.integers(1, 14))
def test_after_the_end_every_gradient_of_everybody_was_applied_exactly_once(
    workers: int, seed: int, length: int, iterations: int
) -> None:
    counted = Counted(noisy(seed))
    crew = Crew(HPSGD(round_length=length), workers, counted, seed=seed).run(iterations).settle()
    start = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    for x in crew.parameters():
        close(x, start - 0.1 / workers * counted.total)
    assert crew.equal()


@given(workers=st.integers(2, 5), seed=seeds, length=lengths)
def test_the_agreed_model_is_the_same_on_all_at_any_time(workers: int, seed: int, length: int) -> None:
    crew = Crew(HPSGD(round_length=length), workers, noisy(seed), seed=seed, optimizer=momentum)
    for _ in range(12):
        models = crew.run(1).models()
        assert all(torch.equal(models[0], model) for model in models)


@given(workers=st.integers(1, 4), seed=seeds)
def test_a_round_of_one_is_sgd_delayed_by_one_step(workers: int, seed: int) -> None:
    """W[k+1] = W[k] - lr * mean gradient at W[k-1], by an independent loop; the first boundary is none."""
    w = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    replicas = [w.clone() for _ in range(workers)]
    last: Tensor | None = None
    for k in range(7):
        gradients = [noisy(seed)(rank, k, x) for rank, x in enumerate(replicas)]
        if last is None:
            replicas = [x - 0.1 * g for x, g in zip(replicas, gradients, strict=True)]
        else:
            w = w - 0.1 * last
            replicas = [w.clone() for _ in replicas]
        last = torch.stack(gradients).mean(0)
    crew = Crew(HPSGD(round_length=1), workers, noisy(seed), seed=seed).run(7)
    close(crew.models()[0], w)
    close(crew.parameters()[0], replicas[0])


@given(workers=st.integers(1, 4), seed=seeds, length=st.integers(1, 4))
def test_the_merge_of_a_round_applies_the_round_before_only(workers: int, seed: int, length: int) -> None:
    """After two rounds the model has moved by the first, which was computed as local SGD would."""
    crew = Crew(HPSGD(round_length=length), workers, noisy(seed), seed=seed).run(2 * length)
    local = Crew(LocalSGD(period=length), workers, noisy(seed), seed=seed).run(length)
    close(crew.models()[0], local.parameters()[0])


@given(workers=st.integers(2, 4), seed=seeds, delays=st.lists(st.integers(0, 4), min_size=8, max_size=8))
def test_a_round_of_no_fixed_length_ends_when_the_average_has_reached_everybody_and_not_before(
    workers: int, seed: int, delays: list[int]
) -> None:
    """Averages take their time to each worker; nobody ever waits for one, and all part at the same moment."""

    def travel(rank: int, lane: int) -> int:
        return delays[(3 * rank + lane) % len(delays)]

    crew = Crew(HPSGD(), workers, noisy(seed), seed=seed, travel=travel).run(20)
    assert crew.waited == 0
    merges = [[i for who, i, name in crew.log if (who, name) == (rank, "Wait")] for rank in range(workers)]
    assert all(each == merges[0] for each in merges)
    slowest = [max(travel(rank, lane) for rank in range(workers)) for lane in range(1, len(merges[0]) + 1)]
    starts = [0, *merges[0]]
    for longest, start, merge in zip(slowest, starts, merges[0], strict=False):
        assert start + longest <= merge <= start + longest + 2  # those who looked too early look again


@given(seed=seeds, length=st.integers(1, 4))
def test_one_average_per_round_and_one_more_at_the_end(seed: int, length: int) -> None:
    crew = Crew(HPSGD(round_length=length), 3, noisy(seed), seed=seed).run(5 * length)
    assert crew.counts == {"average": 5}
    assert crew.settle().counts == {"average": 6}


@pytest.mark.long
def test_it_comes_to_rest_where_local_sgd_does() -> None:
    """Overlap delays, it does not move the fixed point, client drift included."""

    def steady(rank: int, iteration: int, x: Tensor) -> Tensor:
        return (1.0 + rank) * (x - rank)

    for length in (1, 5):
        ours = Crew(HPSGD(round_length=length), 4, steady).run(300 * length).settle()
        theirs = Crew(LocalSGD(period=length), 4, steady).run(300 * length)
        close(ours.parameters()[0], theirs.parameters()[0], rtol=1e-6, atol=1e-6)


@given(seed=seeds, dies=st.integers(0, 9))
def test_the_others_go_on_and_settle_when_one_dies(seed: int, dies: int) -> None:
    crew = Crew(HPSGD(round_length=2), 3, noisy(seed), seed=seed).run(10, dies={1: dies}).settle()
    assert len(crew.living) == 2
    assert crew.equal()


@pytest.mark.parametrize("optimizer", [sgd, momentum, adam])
@given(workers=st.integers(1, 4), seed=seeds, length=st.integers(1, 4), iterations=st.integers(1, 12))
def test_blocking_is_local_sgd_with_the_round_as_its_period(
    optimizer: MakeOptimizer, workers: int, seed: int, length: int, iterations: int
) -> None:
    ours = Crew(HPSGD(round_length=length, blocking=True), workers, noisy(seed), optimizer=optimizer)
    theirs = Crew(LocalSGD(period=length), workers, noisy(seed), optimizer=optimizer)
    assert all(
        torch.equal(x, y)
        for x, y in zip(ours.run(iterations).parameters(), theirs.run(iterations).parameters(), strict=True)
    )
    assert ours.waited == 0
    assert ours.counts == theirs.counts
    assert not ours.protocol.sends_ahead  # so that a checkpoint can be taken at any time
    close(ours.settle().models()[0], theirs.mean())


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="got -1"):
        HPSGD(round_length=-1)
    with pytest.raises(ConfigError, match="got round_length=0, look_ahead=false"):
        HPSGD(blocking=True)
    with pytest.raises(ConfigError, match="look_ahead=true"):
        HPSGD(round_length=2, blocking=True, look_ahead=True)
    assert not HPSGD(round_length=2, blocking=True).caution(0.9)


# Momentum.


def quadratic(curvature: float) -> Gradient:
    return lambda rank, iteration, x: curvature * x


def heavy_ball(lr: float) -> MakeOptimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def length_after(protocol: HPSGD, lr: float, iterations: int = 160) -> float:
    crew = Crew(protocol, 2, quadratic(1.0), optimizer=heavy_ball(lr)).run(iterations)
    return float(torch.stack(crew.models()).norm())


@pytest.mark.parametrize(("lr", "stable"), [(0.08, True), (0.12, False)])
def test_momentum_with_rounds_of_one_is_stable_up_to_one_minus_momentum(lr: float, stable: bool) -> None:
    """The bound that the file names, from both sides; looking ahead has the one of plain heavy ball."""
    start = length_after(HPSGD(round_length=1), lr, iterations=1)
    assert (length_after(HPSGD(round_length=1), lr) < start) is stable
    assert length_after(HPSGD(round_length=1, look_ahead=True), lr) < start


@pytest.mark.parametrize("optimizer", [momentum, adam])
@given(workers=st.integers(1, 3), length=st.integers(1, 4), iterations=st.integers(1, 14))
def test_looking_ahead_workers_with_equal_gradients_train_as_one_alone(
    optimizer: MakeOptimizer, workers: int, length: int, iterations: int
) -> None:
    protocol = HPSGD(round_length=length, look_ahead=True)
    same = noisy(3)
    crew = Crew(protocol, workers, lambda rank, i, x: same(0, i, x), optimizer=optimizer)
    crew.run(iterations).settle()
    alone = large_batch(1, iterations, same, optimizer)
    for x in crew.parameters():
        close(x, alone)


@given(workers=st.integers(1, 4), seed=seeds, length=lengths, iterations=st.integers(1, 12))
def test_looking_ahead_every_gradient_is_applied_exactly_once_too(
    workers: int, seed: int, length: int, iterations: int
) -> None:
    counted = Counted(noisy(seed))
    protocol = HPSGD(round_length=length, look_ahead=True)
    crew = Crew(protocol, workers, counted, seed=seed).run(iterations).settle()
    start = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    for x in crew.parameters():
        close(x, start - 0.1 / workers * counted.total)


def test_who_trains_with_momentum_is_told_of_the_bound_and_the_remedy() -> None:
    told = HPSGD().caution(0.9)
    assert "below 0.1" in told
    assert "look_ahead=true" in told
    assert not HPSGD().caution(0.0)
    assert not HPSGD(look_ahead=True).caution(0.9)


# Sums of gradients.


def falling(iteration: int) -> float:
    return 0.1 * 0.8**iteration


@given(
    workers=st.integers(1, 4), seed=seeds, length=lengths, iterations=st.integers(1, 12), blocks=st.booleans()
)
def test_at_a_constant_rate_sums_of_gradients_are_displacements_bit_for_bit(
    workers: int, seed: int, length: int, iterations: int, blocks: bool
) -> None:
    dials = {"round_length": max(1, length) if blocks else length, "blocking": blocks}
    ours, theirs = (
        Crew(HPSGD(**dials, delta_kind=kind), workers, noisy(seed), seed=seed).run(iterations).settle()  # type: ignore[arg-type]
        for kind in ("grad_sum", "displacement")
    )
    assert all(torch.equal(x, y) for x, y in zip(ours.parameters(), theirs.parameters(), strict=True))


@given(workers=st.integers(1, 4), seed=seeds, length=st.integers(1, 4), rounds=st.integers(1, 4))
def test_sums_of_gradients_step_with_the_rate_at_their_merge(
    workers: int, seed: int, length: int, rounds: int
) -> None:
    """W[k+1] = W[k] - rate at the merge x mean of the sums of the round before, by an independent loop."""
    w = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    replicas, last = [w.clone() for _ in range(workers)], None
    for k in range(rounds):
        sums = torch.zeros(workers, SIZE, dtype=torch.float64)
        for t in range(k * length, (k + 1) * length):
            for rank, x in enumerate(replicas):
                gradient = noisy(seed)(rank, t, x)
                sums[rank] += gradient
                replicas[rank] = x - falling(t) * gradient
        if last is not None:
            w = w - falling((k + 1) * length - 1) * last
            replicas = [w.clone() for _ in replicas]
        last = sums.mean(0)
    protocol = HPSGD(round_length=length, delta_kind="grad_sum")
    crew = Crew(protocol, workers, noisy(seed), seed=seed, rate=falling).run(rounds * length)
    close(crew.models()[0], w)
    close(crew.parameters(), replicas)
    assert last is not None
    close(crew.settle().models()[0], w - falling(rounds * length - 1) * last)


def test_where_the_rate_changes_within_a_round_they_differ_from_displacements() -> None:
    ours, theirs = (
        Crew(HPSGD(round_length=3, delta_kind=kind), 2, noisy(0), rate=falling).run(9).settle()  # type: ignore[arg-type]
        for kind in ("grad_sum", "displacement")
    )
    assert (ours.models()[0] - theirs.models()[0]).abs().max() > 1e-3


def test_with_unequal_rates_the_agreed_model_is_still_the_same_on_all() -> None:
    protocol = HPSGD(round_length=2, delta_kind="grad_sum")
    crew = Crew(protocol, 2, noisy(1))
    for iteration in range(8):
        for worker in crew.workers:
            worker.optimizer.param_groups[0]["lr"] = 0.1 / (1 + worker.me.rank * iteration)
        models = crew.run(1).models()
        assert torch.equal(models[0], models[1])


def test_a_merge_takes_the_smallest_of_the_rates() -> None:
    protocol = HPSGD(round_length=1, blocking=True, delta_kind="grad_sum")
    crew = Crew(protocol, 2, lambda rank, iteration, x: torch.ones_like(x)).run(1)
    crew.workers[1].optimizer.param_groups[0]["lr"] = 0.05
    close(crew.run(1).models()[0], torch.linspace(-1, 1, SIZE, dtype=torch.float64) - 0.15)


def two_groups(parameters: list[Tensor]) -> torch.optim.Optimizer:
    groups = [{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:]}]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(("optimizer", "rate"), [(two_groups, lambda t: 0.1), (sgd, lambda t: 0.0)])
def test_rates_that_sums_of_gradients_cannot_follow_are_refused(
    optimizer: MakeOptimizer, rate: Callable[[int], float]
) -> None:
    """Groups whose rates do not change alike, and a rate of nothing, which shows no gradient."""
    crew = Crew(HPSGD(delta_kind="grad_sum"), 1, noisy(0), optimizer=optimizer).run(1)
    crew.rate = rate
    with pytest.raises(ConfigError, match=r"one factor for all groups.*delta_kind=displacement"):
        crew.run(1)


@pytest.mark.parametrize(("name", "momentum"), [("SGD", 0.9), ("Adam", 0.0), ("AdamW", 0.0)])
def test_sums_of_gradients_are_refused_for_what_is_not_plain_sgd(name: str, momentum: float) -> None:
    with pytest.raises(
        ConfigError, match=f"SGD without momentum only, got {name} with momentum {momentum:g}"
    ):
        HPSGD(delta_kind="grad_sum").check_optimizer(name, momentum)
    HPSGD().check_optimizer(name, momentum)
    HPSGD(delta_kind="grad_sum").check_optimizer("SGD", 0.0)
    with pytest.raises(ConfigError, match="look_ahead=true is for momentum"):
        HPSGD(delta_kind="grad_sum", look_ahead=True)


def test_a_rate_that_began_with_nothing_has_no_factor() -> None:
    assert rate_factor((), ()) == 1.0
    assert rate_factor((0.05, 0.1), (0.1, 0.2)) == 0.5
    for rates, first in [((0.0,), (0.0,)), ((0.1,), (0.0,)), ((0.0,), (0.1,)), ((0.1, 0.1), (0.1, 0.2))]:
        with pytest.raises(ConfigError, match="one factor for all groups"):
            rate_factor(rates, first)


def test_a_rate_that_doubles_counts_twice_in_the_sums_of_gradients() -> None:
    protocol = HPSGD(round_length=1, blocking=True, delta_kind="grad_sum")
    crew = Crew(protocol, 2, lambda rank, iteration, x: torch.ones_like(x), rate=lambda t: 0.1 * (1 + t))
    close(crew.run(2).models()[0], torch.linspace(-1, 1, SIZE, dtype=torch.float64) - 0.3)
