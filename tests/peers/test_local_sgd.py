"""Local SGD, FedAvg and DiLoCo: averaging now and then."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.core.operations import Steps
from paceline.protocols.core.peer import Me
from paceline.protocols.peer.diloco import DiLoCo
from paceline.protocols.peer.fedavg import FedAvg
from paceline.protocols.peer.local_sgd import LocalSGD
from support.peers import Crew
from support.problems import SIZE, MakeOptimizer, adam, large_batch, momentum, noisy, nothing, sgd

close = torch.testing.assert_close
workers = st.integers(1, 5)
seeds = st.integers(0, 99)


@pytest.mark.parametrize("optimizer", [sgd, momentum])
@given(workers=workers, seed=seeds)
def test_a_period_of_one_is_bsp_for_sgd_with_momentum_and_decay(
    optimizer: MakeOptimizer, workers: int, seed: int
) -> None:
    crew = Crew(LocalSGD(period=1), workers, noisy(seed), seed=seed, optimizer=optimizer).run(9)
    close(crew.parameters()[0], large_batch(workers, 9, noisy(seed), optimizer))
    assert crew.equal()


def test_a_period_of_one_is_not_bsp_for_adam() -> None:
    crew = Crew(LocalSGD(period=1), 3, noisy(1), optimizer=adam).run(5)
    assert not torch.allclose(crew.parameters()[0], large_batch(3, 5, noisy(1), adam))


@given(workers=st.integers(2, 5), period=st.integers(2, 6), seed=seeds)
def test_replicas_are_equal_after_an_averaging_and_differ_in_between(
    workers: int, period: int, seed: int
) -> None:
    crew = Crew(LocalSGD(period=period), workers, noisy(seed), seed=seed)
    for iteration in range(1, 3 * period + 1):
        crew.run(1)
        assert crew.equal() == (iteration % period == 0)
        assert crew.counts["average"] == iteration // period


@given(workers=workers, seed=seeds)
def test_an_averaging_leaves_the_mean_of_the_replicas_as_it_was(workers: int, seed: int) -> None:
    apart = Crew(LocalSGD(period=100), workers, noisy(seed), seed=seed).run(4)
    averaged = Crew(LocalSGD(period=4), workers, noisy(seed), seed=seed).run(4)
    close(averaged.mean(), apart.mean())


def test_without_an_averaging_every_worker_trains_alone() -> None:
    crew = Crew(LocalSGD(period=50), 3, noisy(2)).run(10)
    for rank, x in enumerate(crew.parameters()):
        alone = large_batch(1, 10, lambda _, iteration, at, rank=rank: noisy(2)(rank, iteration, at))
        close(x, alone)


@pytest.mark.parametrize(
    ("settings", "averaged"),
    [
        ({"period": 4}, [4, 8, 12]),
        ({"period": 4, "every_until": 3}, [1, 2, 3, 7, 11]),
        ({"period": 4, "every_until": 12}, list(range(1, 13))),
        ({"period": 4, "every_until": 0}, [4, 8, 12]),
        ({"period": 4, "warmup": 8}, [1, 2, 3, 5, 9]),
        ({"period": 3, "every_until": 2, "warmup": 4}, [1, 2, 3, 4, 7, 10]),
    ],
)
def test_the_iterations_after_which_models_are_averaged(
    settings: dict[str, int], averaged: list[int]
) -> None:
    crew, seen = Crew(LocalSGD(**settings), 2, noisy(0)), []
    for iteration in range(1, 13):
        before = crew.counts["average"]
        crew.run(1)
        if crew.counts["average"] > before:
            seen.append(iteration)
    assert seen == averaged


def test_buffers_are_averaged_with_the_model() -> None:
    def own(rank: int) -> torch.Tensor:
        return torch.full((2,), float(rank), dtype=torch.float64)

    crew = Crew(LocalSGD(period=2), 3, noisy(0), buffers=own).run(1)
    assert [float(worker.buffers[0][0]) for worker in crew.workers] == [0, 1, 2]
    crew.run(1)
    assert [float(worker.buffers[0][0]) for worker in crew.workers] == pytest.approx([1, 1, 1])


def test_a_worker_that_dies_is_left_out_of_the_next_averaging() -> None:
    crew = Crew(LocalSGD(period=2), 3, noisy(3)).run(6, dies={1: 3})
    assert len(crew.living) == 2
    assert crew.equal()


# -- FedAvg ---------------------------------------------------------------------------------------


@given(workers=workers, period=st.integers(1, 5), seed=seeds)
def test_fedavg_with_equal_batches_and_plain_sgd_is_local_sgd(workers: int, period: int, seed: int) -> None:
    ours = Crew(FedAvg(period=period), workers, noisy(seed), seed=seed).run(2 * period)
    theirs = Crew(LocalSGD(period=period), workers, noisy(seed), seed=seed).run(2 * period)
    close(ours.parameters(), theirs.parameters())


def test_fedavg_with_rounds_of_one_is_gradient_descent_on_the_weighted_loss() -> None:
    def samples(rank: int, iteration: int) -> int:
        return 1 + rank

    crew = Crew(FedAvg(period=1), 3, noisy(4), samples=samples).run(6)
    close(crew.parameters()[0], large_batch(3, 6, noisy(4), samples=samples))


def test_fedavg_weighs_a_round_by_all_its_samples() -> None:
    def samples(rank: int, iteration: int) -> int:
        return (1, 5)[rank] if iteration % 2 else (3, 1)[rank]

    apart = Crew(LocalSGD(period=9), 2, noisy(5)).run(2).parameters()
    crew = Crew(FedAvg(period=2), 2, noisy(5), samples=samples).run(2)
    close(crew.parameters()[0], 0.4 * apart[0] + 0.6 * apart[1])


def test_fedavg_forgets_momentum_after_each_round_and_local_sgd_keeps_it() -> None:
    forgets = Crew(FedAvg(period=2), 2, noisy(6), optimizer=momentum).run(2)
    keeps = Crew(LocalSGD(period=2), 2, noisy(6), optimizer=momentum).run(2)
    assert all(not worker.optimizer.state for worker in forgets.workers)
    assert all(worker.optimizer.state for worker in keeps.workers)
    close(
        forgets.run(4).parameters(),
        Crew(LocalSGD(period=2, optimizer="reset"), 2, noisy(6), optimizer=momentum).run(6).parameters(),
    )


# -- DiLoCo ---------------------------------------------------------------------------------------


@given(workers=workers, period=st.integers(1, 5), seed=seeds)
def test_diloco_with_rate_one_and_no_momentum_is_local_sgd(workers: int, period: int, seed: int) -> None:
    outer = DiLoCo(period=period, lr=1.0, momentum=0.0)
    ours = Crew(outer, workers, noisy(seed), seed=seed, optimizer=momentum).run(2 * period)
    theirs = Crew(LocalSGD(period=period), workers, noisy(seed), seed=seed, optimizer=momentum).run(
        2 * period
    )
    close(ours.parameters(), theirs.parameters())


@given(workers=st.integers(1, 4), seed=seeds)
def test_diloco_steps_as_torchs_nesterov_does(workers: int, seed: int) -> None:
    """The reference is torch's own optimizer on the mean displacement."""
    crew = Crew(DiLoCo(period=3), workers, noisy(seed), seed=seed)
    outer_x = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    outer = torch.optim.SGD([outer_x], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        inner = Crew(LocalSGD(period=99), workers, _from(noisy(seed), crew), initial=lambda _: outer_x).run(3)
        outer_x.grad = outer_x - inner.mean()
        outer.step()
        crew.run(3)
        close(crew.parameters()[0], outer_x)
        assert crew.equal()


def _from(gradient: Any, crew: Crew) -> Any:
    begun = crew.workers[0].me.count
    return lambda rank, iteration, x: gradient(rank, begun + iteration, x)


@given(workers=workers, seed=seeds, period=st.integers(1, 3))
def test_diloco_weights_a_displacement_by_its_samples_since_the_last_outer_step(
    workers: int, seed: int, period: int
) -> None:
    """By hand, over plain tensors: one outer step with weights that differ from round to round."""
    protocol = DiLoCo(period=period, lr=0.5, momentum=0.0, weights="samples")

    def samples(rank: int, iteration: int) -> int:
        return 1 + (3 * rank + 5 * iteration) % 7

    crew = Crew(protocol, workers, noisy(seed), seed=seed, samples=samples).run(2 * period)
    theta = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    for first in (0, period):
        mean, total = torch.zeros_like(theta), 0
        for rank in range(workers):
            x, behind = theta.clone(), 0
            for t in range(first, first + period):
                x, behind = x - 0.1 * noisy(seed)(rank, t, x), behind + samples(rank, t)
            mean, total = mean + behind * (theta - x), total + behind
        theta = theta - 0.5 * mean / total
    close(crew.parameters()[0], theta)
    assert crew.equal()


def test_diloco_first_outer_step_moves_by_lr_times_one_plus_momentum() -> None:
    """All move by d, so the displacement is -d, and the model goes on along d: the sign is right."""
    start = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    crew = Crew(DiLoCo(period=1), 3, lambda rank, iteration, x: torch.ones_like(x)).run(1)
    close(crew.parameters()[0], start + 0.7 * 1.9 * -0.1)


def test_diloco_agrees_on_snapshot_and_momentum() -> None:
    crew = Crew(DiLoCo(period=2), 3, noisy(8), optimizer=momentum).run(6)
    first, *others = (worker.me.agreed for worker in crew.workers)
    for other in others:
        assert torch.equal(first.snapshot.parts[0], other.snapshot.parts[0])
        assert torch.equal(first.momentum.parts[0], other.momentum.parts[0])


def test_diloco_alone_is_not_the_inner_optimizer_alone() -> None:
    crew = Crew(DiLoCo(period=2), 1, noisy(9)).run(4)
    assert not torch.allclose(crew.parameters()[0], large_batch(1, 4, noisy(9)))
    assert not DiLoCo().plain_alone


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocalSGD(period=0), "period must be >= 1 iterations, got 0"),
        (lambda: LocalSGD(every_until=-2), "got -2"),
        (lambda: FedAvg(period=-1), "got -1"),
        (lambda: FedAvg(fraction=0), "in \\(0, 1\\], got 0"),
        (lambda: DiLoCo(lr=0), "lr=0"),
        (lambda: DiLoCo(momentum=1.0), "momentum=1"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_nothing_to_learn_changes_nothing() -> None:
    for protocol in (LocalSGD(period=2), FedAvg(period=2), DiLoCo(period=2)):
        crew = Crew(protocol, 3, nothing).run(5)
        close(crew.parameters()[0], torch.linspace(-1, 1, SIZE, dtype=torch.float64))


# -- some of the clients in every round -----------------------------------------------------------------


class Seen(FedAvg):
    """Keeps every worker's model after every round."""

    models: ClassVar[dict[tuple[int, int], Tensor]] = {}

    def end_round(self, me: Me, weight: float) -> Steps:
        yield from FedAvg.end_round(self, me, weight)
        parameters: Any = me.parameters
        self.models[me.agreed.round, me.rank] = parameters.parts[0].clone()


@given(
    workers=st.integers(1, 5),
    seed=seeds,
    fraction=st.sampled_from([0.1, 0.4, 0.5, 0.8]),
    rounds=st.integers(1, 4),
)
def test_in_a_fedavg_round_only_the_clients_train_and_all_become_their_weighted_mean(
    workers: int, seed: int, fraction: float, rounds: int
) -> None:
    """An independent loop over rounds; batches are of unequal size. Nobody leaves before the last one."""

    def samples(rank: int, iteration: int) -> int:
        return 1 + (rank + iteration) % 3

    protocol, done = Seen(period=2, fraction=fraction), [0] * workers
    crew = Crew(protocol, workers, noisy(seed), seed=seed, samples=samples).finish(2 * rounds)
    model = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    me = crew.workers[0].me
    for number in range(rounds):
        me.agreed.round = number
        clients = protocol.clients(me)
        assert len(clients) == max(1, round(fraction * workers))
        total, weight = torch.zeros_like(model), 0
        for rank in clients:
            x, counted = model.clone(), 0
            for _ in range(2):
                counted += samples(rank, done[rank])
                x = x - 0.1 * noisy(seed)(rank, done[rank], x)
                done[rank] += 1
            total, weight = total + counted * x, weight + counted
        model = total / weight
        for rank in range(workers):
            close(protocol.models[number + 1, rank], model)


@given(workers=st.integers(1, 5), seed=seeds, fraction=st.sampled_from([0.1, 0.5, 1.0]))
def test_everybody_does_its_share_whoever_is_drawn(workers: int, seed: int, fraction: float) -> None:
    """Also when all who are drawn have left."""
    crew = Crew(FedAvg(period=2, fraction=fraction), workers, noisy(seed), seed=seed).finish(6)
    assert [worker.me.count for worker in crew.workers] == [6] * workers


# -- what the optimizer remembers ------------------------------------------------------------------------


@given(workers=st.integers(1, 4), seed=seeds, period=st.integers(1, 3))
def test_averaged_momentum_is_the_mean_of_all_and_kept_or_not_it_is_bsp_with_a_period_of_one(
    workers: int, seed: int, period: int
) -> None:
    crew = Crew(LocalSGD(period, optimizer="average"), workers, noisy(seed), seed=seed, optimizer=momentum)
    crew.run(period - 1)
    others = Crew(LocalSGD(period, optimizer="keep"), workers, noisy(seed), seed=seed, optimizer=momentum)
    others.run(period)
    crew.run(1)
    kept = [[each.optimizer.state[view]["momentum_buffer"] for view in each.views] for each in others.workers]
    means = [torch.stack(each).mean(0) for each in zip(*kept, strict=True)]
    for worker in crew.workers:
        for view, mean in zip(worker.views, means, strict=True):
            close(worker.optimizer.state[view]["momentum_buffer"], mean)
    if period == 1:
        close(crew.run(4).parameters()[0], large_batch(workers, 5, noisy(seed), momentum))


def test_adams_moments_are_averaged_and_its_count_of_steps_is_not() -> None:
    crew = Crew(LocalSGD(2, optimizer="average"), 3, noisy(0), optimizer=adam).run(4)
    for name in ("exp_avg", "exp_avg_sq"):
        first, *others = [[w.optimizer.state[view][name] for view in w.views] for w in crew.workers]
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert {float(w.optimizer.state[view]["step"]) for w in crew.workers for view in w.views} == {4.0}
    assert crew.counts["average"] == 2 * 3, "a model and two moments at each averaging"


def test_an_optimizer_that_remembers_nothing_sends_nothing() -> None:
    crew = Crew(LocalSGD(2, optimizer="average"), 3, noisy(0)).run(4)
    assert crew.counts["average"] == 2


# -- after the end ----------------------------------------------------------------------------------------


def settled(me: Any, latest: int) -> float:
    """What a worker that has come to its end weighs in a last round, when the furthest is in that one."""
    steps = FedAvg(period=2).settle(me)
    next(steps)
    average = steps.send(latest)
    with contextlib.suppress(StopIteration):
        answer = average.vector * 0
        while True:
            answer = steps.send(answer).vector
    return float(average.weight)


def test_at_the_end_who_has_begun_no_round_weighs_what_it_did_in_the_last_or_nothing() -> None:
    me = Crew(FedAvg(period=2), 2, noisy(8), samples=lambda rank, iteration: 3).run(3).workers[0].me
    assert settled(me, 1) == 3, "the round it has begun"
    assert settled(me, 1) == 6, "what it has begun is done, so the round before"
    assert settled(me, 2) == 0, "it was not in the last round"


def test_at_the_end_all_fedavg_replicas_are_the_model() -> None:
    crew = Crew(FedAvg(period=4), 2, noisy(8)).run(2).settle()
    assert all(torch.equal(x, model) for x, model in zip(crew.parameters(), crew.models(), strict=True))
