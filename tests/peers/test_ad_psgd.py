"""AD-PSGD and asynchronous EASGD: one-sided exchanges, in whatever order they come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.protocols.core.operations import CENTRE, Rule
from paceline.protocols.core.peer import Me
from paceline.protocols.peer.ad_psgd import ADPSGD
from paceline.protocols.peer.easgd import EASGD
from paceline.store.cells import Cells
from paceline.store.vector import FlatVector
from support.peers import Crew
from support.problems import SIZE, Gradient, large_batch, momentum, noisy, nothing, sgd

close = torch.testing.assert_close
seeds = st.integers(0, 99)
topologies = st.sampled_from(["ring", "exponential", "complete"])
START = torch.linspace(-1, 1, SIZE, dtype=torch.float64)


def vector(*numbers: float) -> list[Tensor]:
    return [torch.tensor(numbers, dtype=torch.float64)]


def test_gossip_keeps_the_sum_of_both_and_adds_the_step_to_ones_own() -> None:
    cells, answer = Cells(vector(0, 0)), vector(9, 9)
    cells.exchange(Rule.GOSSIP, 1, None, 1.0, vector(4, 8), answer)
    assert answer[0].tolist() == cells[1][0].tolist() == [4, 8]
    cells.exchange(Rule.GOSSIP, 0, 1, 1.0, vector(1, 0), answer)
    assert answer[0].tolist() == cells[0][0].tolist() == [3, 4]
    assert cells[1][0].tolist() == [2, 4]
    assert cells[2][0].tolist() == [0, 0]


def test_an_elastic_exchange_leaves_replica_and_centre_together_where_they_were() -> None:
    cells, answer, x = Cells(vector(1, 2)), vector(0, 0), vector(5, 0)
    cells.exchange(Rule.ELASTIC, CENTRE, None, 0.25, x, answer)
    assert answer[0].tolist() == [1, -0.5]
    assert cells[CENTRE][0].tolist() == [2, 1.5]
    assert ((x[0] - answer[0]) + cells[CENTRE][0]).tolist() == [6, 2]


def counted(seed: int) -> tuple[Gradient, Tensor]:
    """Noisy gradients, and the sum of all that were asked for."""
    total = torch.zeros(SIZE, dtype=torch.float64)

    def gradient(rank: int, iteration: int, x: Tensor) -> Tensor:
        value = noisy(seed)(rank, iteration, x)
        total.add_(value)
        return value

    return gradient, total


@given(workers=st.integers(1, 6), seed=seeds, topology=topologies)
def test_the_sum_of_all_models_changes_by_the_workers_own_steps_only(
    workers: int, seed: int, topology: Any
) -> None:
    gradient, total = counted(seed)
    crew = Crew(ADPSGD(topology=topology), workers, gradient, seed=seed).run(9)
    close(torch.stack(crew.models()).sum(0), workers * START - 0.1 * total)


@given(workers=st.integers(2, 6), seed=seeds, topology=topologies)
def test_published_models_come_together_without_gradients(workers: int, seed: int, topology: Any) -> None:
    crew = Crew(ADPSGD(topology=topology), workers, nothing, seed=seed)
    for rank in range(workers):
        crew.cells[rank][0].fill_(float(rank))
    crew.run(60)
    mean = (workers - 1) / 2
    assert all(float((model - mean).abs().max()) < 0.05 for model in crew.models())


def test_nobody_waits_however_late_another_is() -> None:
    crew = Crew(ADPSGD(), 3, noisy(0))
    for worker in crew.workers:
        worker.goal = 20
    while ready := [w for w in crew.workers if w.runnable and w.me.rank != 1]:
        ready[0].turn()
    assert [worker.me.count for worker in crew.workers] == [20, 0, 20]


@given(workers=st.integers(1, 5), seed=seeds, topology=topologies)
def test_a_gradient_of_the_weights_before_averaging_is_applied_to_the_averaged_ones(
    workers: int, seed: int, topology: Any
) -> None:
    """The paper's form, computed beside: in the order in which exchanges were started, whatever it was."""
    made, gradient = ADPSGD(topology=topology), noisy(seed)
    crew = Crew(made, workers, gradient, seed=seed).run(6)
    x, cells, answers = [START] * workers, [START] * workers, [START] * workers
    everybody = tuple(range(workers))
    for rank, count, operation in crew.log:
        if operation == "Start":
            moved = -0.1 * gradient(rank, count, x[rank])
            x[rank] = answers[rank] + moved
            me = Me(rank, workers, seed, FlatVector([START]), FlatVector([]), members=everybody, count=count)
            other = made.neighbour(me)
            if other is not None:
                cells[rank] = cells[other] = (cells[rank] + cells[other]) / 2
            cells[rank] = answers[rank] = cells[rank] + moved
    for mine, theirs in zip(crew.models(), cells, strict=True):
        close(mine, theirs)
    for mine, theirs in zip(crew.settle().parameters(), answers, strict=True):
        close(mine, theirs)


@given(workers=st.integers(1, 5), seed=seeds)
def test_one_after_the_other_every_step_is_of_the_averaged_weights(workers: int, seed: int) -> None:
    gradient, total = counted(seed)
    crew = Crew(ADPSGD(overlap=False), workers, gradient, seed=seed).run(6)
    close(torch.stack(crew.models()).sum(0), workers * START - 0.1 * total)
    assert {operation for *_, operation in crew.log} == {"Compute", "Step", "Exchange"}


def test_an_odd_ring_will_do_and_neighbours_are_beside() -> None:
    drawn = set()
    for count in range(40):
        me = Me(0, 5, 3, FlatVector([START]), FlatVector([]), members=(0, 1, 2, 3, 4), count=count)
        drawn.add(ADPSGD().neighbour(me))
    assert drawn == {1, 4}


@pytest.mark.parametrize("optimizer", [sgd, momentum])
def test_one_worker_alone_is_plain_sgd(optimizer: Any) -> None:
    crew = Crew(ADPSGD(), 1, noisy(1), optimizer=optimizer).run(8)
    close(crew.models()[0], large_batch(1, 8, noisy(1), optimizer))


# -- asynchronous EASGD -------------------------------------------------------------------------------


@given(workers=st.integers(1, 5), seed=seeds, beta=st.floats(0, 1), period=st.integers(1, 4))
def test_replicas_and_centre_together_change_by_gradients_only(
    workers: int, seed: int, beta: float, period: int
) -> None:
    gradient, total = counted(seed)
    crew = Crew(EASGD(period=period, beta=beta, mode="asynchronous"), workers, gradient, seed=seed).run(9)
    together = torch.stack(crew.parameters()).sum(0) + crew.cells[CENTRE][0]
    close(together, (workers + 1) * START - 0.1 * total)
    assert all(torch.equal(model, crew.cells[CENTRE][0]) for model in crew.models())


def test_it_follows_the_authors_order_of_events() -> None:
    """One worker: e from the current x; the centre takes e; the local step from the same x; x less e."""
    x = c = START
    for t in range(7):
        e = 0.9 * (x - c) if t % 3 == 0 else torch.zeros_like(x)
        c = c + e
        x = x - 0.1 * noisy(4)(0, t, x) - e
    crew = Crew(EASGD(period=3, mode="asynchronous"), 1, noisy(4)).run(7)
    close(crew.parameters()[0], x)
    close(crew.models()[0], c)


def test_nobody_waits_for_the_centre() -> None:
    crew = Crew(EASGD(period=1, mode="asynchronous"), 2, noisy(0))
    crew.workers[0].goal = 5
    while crew.workers[0].runnable:
        crew.workers[0].turn()
    assert [worker.me.count for worker in crew.workers] == [5, 0]


@given(seed=seeds, workers=st.integers(2, 5))
def test_in_lockstep_and_with_weak_springs_it_is_the_synchronous_one(seed: int, workers: int) -> None:
    """Who comes second finds a centre that has moved by one spring already. What that changes is of second
    order in alpha: half the springs, a quarter of the difference. One worker alone has none at all."""

    def apart(alpha: float, workers: int) -> float:
        runs = []
        for mode in ("asynchronous", "synchronous"):
            made = EASGD(period=1, alpha=alpha, mode=mode)  # type: ignore[arg-type]
            crew = Crew(made, workers, noisy(seed), seed=seed)
            for _ in range(4):
                crew.run(1)
            runs.append(torch.stack([*crew.parameters(), crew.models()[0]]))
        return float((runs[0] - runs[1]).norm())

    assert apart(0.9, 1) < 1e-12
    weak = apart(0.0005, workers)
    assert 0 < weak < 1e-4
    assert apart(0.001, workers) == pytest.approx(4 * weak, rel=0.1)
