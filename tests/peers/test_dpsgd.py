"""Decentralised SGD: topologies, and what mixing leaves alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.core.topology import Topology, parse_graph, parts
from paceline.protocols.peer.dpsgd import DPSGD
from support.peers import Crew
from support.problems import SIZE, MakeOptimizer, large_batch, momentum, noisy, nothing, sgd

close = torch.testing.assert_close
KINDS = ["ring", "exponential", "one_peer", "matching", "complete"]
ORDERS = ["combine_then_adapt", "adapt_then_combine"]
GRAPH = "0-1,1-2,2-3,0-4,1-4"
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 99)


def matrix(topology: Topology, members: list[int], step: int) -> np.ndarray:
    rows = topology.rows(members, step)
    assert list(rows) == members
    return np.array([[rows[j].get(k, 0.0) for k in members] for j in members])


def spread(w: np.ndarray) -> float:
    """The second largest singular value: how much of a disagreement is left."""
    return float(np.linalg.norm(w - 1 / len(w), 2))


@given(
    kind=st.sampled_from([*KINDS, "graph"]),
    members=st.sets(st.integers(0, 11), min_size=1),
    step=st.integers(0, 50),
    seed=seeds,
)
def test_rows_and_columns_sum_to_one_whoever_is_left(
    kind: Any, members: set[int], step: int, seed: int
) -> None:
    w = matrix(Topology(kind, seed, parse_graph(GRAPH)), sorted(members), step)
    assert w.min() >= 0
    np.testing.assert_allclose(w.sum(0), 1, atol=1e-12)
    np.testing.assert_allclose(w.sum(1), 1, atol=1e-12)


@pytest.mark.parametrize(
    ("workers", "ring", "exponential"),
    [
        (4, 0.33333, 0.33333),
        (8, 0.80474, 0.5),
        (16, 0.94925, 0.6),
        (32, 0.98719, 0.66667),
        (64, 0.99679, 0.71429),
    ],
)
def test_spectral_values_are_those_computed_for_these_graphs(
    workers: int, ring: float, exponential: float
) -> None:
    members = list(range(workers))
    assert spread(matrix(Topology("ring"), members, 0)) == pytest.approx(ring, abs=1e-5)
    assert spread(matrix(Topology("exponential"), members, 0)) == pytest.approx(exponential, abs=1e-5)


def test_two_on_a_ring_share_half_and_half_and_three_are_complete() -> None:
    np.testing.assert_allclose(matrix(Topology("ring"), [0, 1], 0), 0.5)
    np.testing.assert_allclose(matrix(Topology("ring"), [0, 1, 2], 0), 1 / 3)


def test_a_matching_is_symmetric_leaves_at_most_one_alone_and_differs_from_step_to_step() -> None:
    drawn = [matrix(Topology("matching", seed=3), list(range(7)), step) for step in range(6)]
    for w in drawn:
        np.testing.assert_array_equal(w, w.T)
        np.testing.assert_allclose(w @ w, w)
        assert (np.diag(w) == 1).sum() == 1
    assert any(not np.array_equal(drawn[0], w) for w in drawn[1:])


def test_random_matching_contracts_in_the_mean_as_computed() -> None:
    workers, steps = 8, 4000
    drawn = [matrix(Topology("matching"), list(range(workers)), step) for step in range(steps)]
    mean = sum(w.T @ w for w in drawn) / steps
    assert sorted(np.linalg.eigvalsh(mean))[-2] == pytest.approx(
        (workers - 2) / (2 * (workers - 1)), abs=0.03
    )


def scattered(rank: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@pytest.mark.parametrize(("workers", "exact"), [(2, True), (4, True), (8, True), (6, False)])
def test_one_peer_exponential_reaches_the_exact_mean_for_powers_of_two_only(
    workers: int, exact: bool
) -> None:
    crew = Crew(DPSGD(topology="one_peer"), workers, nothing, initial=scattered)
    mean, steps = crew.mean(), (workers - 1).bit_length()
    crew.run(steps - 1)
    assert not all(torch.allclose(x, mean) for x in crew.parameters()) or steps == 1
    crew.run(1)
    assert all(torch.allclose(x, mean, atol=1e-12) for x in crew.parameters()) == exact


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("optimizer", [sgd, momentum])
@given(kind=kinds, workers=st.integers(1, 6), seed=seeds)
def test_the_mean_moves_by_the_mean_step_whatever_the_topology(
    order: Any, optimizer: MakeOptimizer, kind: Any, workers: int, seed: int
) -> None:
    """The reference takes every worker's step at its own replica, alone, and averages the steps."""
    crew = Crew(DPSGD(topology=kind, order=order), workers, noisy(seed), seed=seed, optimizer=optimizer)
    for iteration in range(5):
        before, mean = crew.parameters(), crew.mean()
        memories = [
            [worker.optimizer.state.get(view, {}) for view in worker.views] for worker in crew.workers
        ]
        kept = [[state.get("momentum_buffer") for state in states] for states in memories]
        buffers = [None if each[0] is None else torch.cat(each) for each in kept]
        steps = []
        for rank, x in enumerate(before):
            alone, own = x.clone(), None if buffers[rank] is None else buffers[rank].clone()
            rule = optimizer([alone])
            if own is not None:
                rule.state[alone]["momentum_buffer"] = own
            alone.grad = noisy(seed)(rank, iteration, x)
            rule.step()
            steps.append(alone - x)
        crew.run(1)
        close(crew.mean(), mean + torch.stack(steps).mean(0))


@pytest.mark.parametrize("optimizer", [sgd, momentum])
@given(workers=st.integers(1, 6), seed=seeds)
def test_a_complete_graph_that_adapts_then_combines_is_bsp(
    optimizer: MakeOptimizer, workers: int, seed: int
) -> None:
    protocol = DPSGD(topology="complete", order="adapt_then_combine")
    crew = Crew(protocol, workers, noisy(seed), seed=seed, optimizer=optimizer).run(7)
    for x in crew.parameters():
        close(x, large_batch(workers, 7, noisy(seed), optimizer))


@given(workers=st.integers(2, 5), seed=seeds)
def test_a_complete_graph_that_combines_then_adapts_is_not(workers: int, seed: int) -> None:
    """Replicas differ by their own last steps: x_j = mean - lr * g_j."""
    crew = Crew(DPSGD(topology="complete"), workers, noisy(seed), seed=seed).run(3)
    before, mean = crew.parameters(), crew.mean()
    crew.run(1)
    for rank, x in enumerate(crew.parameters()):
        close(x, mean - 0.1 * noisy(seed)(rank, 3, before[rank]))


@pytest.mark.parametrize("optimizer", [sgd, momentum])
@given(kind=kinds, workers=st.integers(1, 6), seed=seeds)
def test_mixing_beside_the_gradient_changes_no_bit(
    optimizer: MakeOptimizer, kind: Any, workers: int, seed: int
) -> None:
    one, other = (
        Crew(DPSGD(topology=kind, overlap=each), workers, noisy(seed), seed=seed, optimizer=optimizer).run(6)
        for each in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("overlap", [None, False])
@given(kind=kinds, workers=st.integers(2, 6), seed=seeds)
def test_a_step_is_taken_at_ones_own_weights_and_added_to_the_mixture(
    overlap: Any, kind: Any, workers: int, seed: int
) -> None:
    """Weight decay sees where it is taken: at the mixture it would pull another way."""

    def decaying(views: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(views, lr=0.1, weight_decay=0.5)

    made = DPSGD(topology=kind, overlap=overlap)
    crew = Crew(made, workers, noisy(seed), seed=seed, optimizer=decaying, initial=scattered)
    for step in range(3):
        before, w = crew.parameters(), matrix(Topology(kind, seed), list(range(workers)), step)
        after = crew.run(1).parameters()
        for rank, x in enumerate(before):
            mixed = sum(share * other for share, other in zip(w[rank], before, strict=True))
            close(after[rank], mixed - 0.1 * (noisy(seed)(rank, step, x) + 0.5 * x))


@given(workers=st.integers(2, 5), seed=seeds)
def test_the_default_is_the_form_of_the_paper(workers: int, seed: int) -> None:
    """Gradient at one's own weights while they are mixed; the mixture less the step is what comes next."""
    crew = Crew(DPSGD(), workers, noisy(seed), seed=seed).run(1)
    for worker in crew.workers:
        mine = [operation for rank, _, operation in crew.log if rank == worker.me.rank]
        assert mine == ["Start", "Compute", "Wait", "Step"]


def test_what_is_mixed_along_cannot_be_mixed_before() -> None:
    with pytest.raises(ConfigError, match="Leave overlap out"):
        DPSGD(order="adapt_then_combine", overlap=True)


@given(seed=seeds)
def test_matching_of_two_that_adapts_then_combines_is_bsp(seed: int) -> None:
    crew = Crew(DPSGD(topology="matching", order="adapt_then_combine"), 2, noisy(seed), seed=seed).run(5)
    close(crew.parameters()[0], large_batch(2, 5, noisy(seed)))


@given(kind=kinds, workers=st.integers(2, 7))
def test_without_gradients_replicas_come_together_at_the_rate_of_the_topology(
    kind: Any, workers: int
) -> None:
    crew = Crew(DPSGD(topology=kind), workers, nothing, initial=scattered)
    mean, topology = crew.mean(), Topology(kind, seed=0)
    for step in range(5):
        before = sum(float((x - mean).square().sum()) for x in crew.parameters())
        crew.run(1)
        after = sum(float((x - mean).square().sum()) for x in crew.parameters())
        sigma = spread(matrix(topology, list(range(workers)), step))
        assert after <= sigma**2 * before + 1e-12


@given(kind=kinds, workers=st.integers(1, 5), seed=seeds)
def test_with_a_common_hessian_and_common_data_the_mean_follows_bsp(
    kind: Any, workers: int, seed: int
) -> None:
    crew = Crew(DPSGD(topology=kind), workers, lambda rank, i, x: 2 * x - i, initial=scattered, seed=seed)
    x = crew.mean()
    crew.run(6)
    for iteration in range(6):
        x = x - 0.1 * (2 * x - iteration)
    close(crew.mean(), x)


def test_a_matching_does_not_wait_for_other_pairs() -> None:
    crew = Crew(DPSGD(topology="matching"), 4, noisy(0))
    rows = Topology("matching", seed=0).rows(range(4), 0)
    late = 3
    pair = parts(rows)[late]
    for worker in crew.workers:
        worker.goal = 1
    while any(worker.runnable and worker.me.rank != late for worker in crew.workers):
        next(w for w in crew.workers if w.runnable and w.me.rank != late).turn()
    assert {worker.me.rank for worker in crew.workers if worker.me.count == 1} == set(range(4)) - pair


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_others_go_on_when_a_worker_dies(kind: Any, order: Any) -> None:
    crew = Crew(DPSGD(topology=kind, order=order), 5, noisy(4)).run(8, dies={2: 3})
    assert len(crew.living) == 4
    assert all(bool(torch.isfinite(x).all()) for x in crew.parameters())


@pytest.mark.parametrize(
    ("graph", "workers", "words"),
    [
        ("0-1,2-3", 4, "not connected: updates of rank 0 never reach rank 2"),
        ("0-1,1-2", 4, "rank 3"),
        ("0-1,1-4", 3, "edge 1-4"),
        ("0-0", 2, "edge 0-0"),
        ("0-1:0.7,0-2:0.6", 3, "rank 0 add up to 1.3.*not doubly stochastic"),
    ],
)
def test_a_graph_that_cannot_work_is_refused_with_the_reason(graph: str, workers: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DPSGD(topology="graph", graph=graph).check(workers)


def test_a_graph_of_ones_own_mixes_by_degrees_or_by_the_shares_given() -> None:
    w = matrix(Topology("graph", edges=parse_graph("0-1,1-2,2-3:0.125")), [0, 1, 2, 3], 0)
    assert w[0, 1] == w[1, 0] == w[1, 2] == pytest.approx(1 / 3)
    assert w[2, 3] == w[3, 2] == 0.125
    assert w[3, 3] == 0.875


@pytest.mark.parametrize(
    "settings",
    [
        {"topology": "graph"},
        {"graph": "0-1"},
        {"topology": "graph", "graph": "0:1"},
        {"topology": "graph", "graph": "a-b"},
    ],
)
def test_graphs_that_are_not_well_written_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"graph|0-1"):
        DPSGD(**settings)


# -- the effective learning rate ---------------------------------------------------------------------


def measured(crew: Crew) -> dict[str, float]:
    """What everybody was told; all the same."""
    told = [worker.me.told for worker in crew.living]
    assert all(each == told[0] for each in told)
    return told[0]


@pytest.mark.parametrize("topology", ["ring", "matching", "complete"])
@given(seed=st.integers(0, 99), workers=st.integers(2, 5))
def test_the_effective_learning_rate_is_what_its_definition_says(
    topology: Any, seed: int, workers: int
) -> None:
    """By an independent computation from the replicas before the step."""
    crew = Crew(DPSGD(topology, measure_every=4), workers, noisy(seed), seed=seed).run(4)
    replicas = crew.parameters()
    mean = torch.stack(replicas).mean(0)
    taken = torch.stack([noisy(seed)(rank, 4, x) for rank, x in enumerate(replicas)]).mean(0)
    at_mean = torch.stack([noisy(seed)(rank, 4, mean) for rank in range(workers)]).mean(0)
    told = measured(crew.run(1))
    share = float(taken.dot(at_mean) / at_mean.dot(at_mean))
    assert told["effective_lr"] == pytest.approx(share)
    assert told["weight_variance"] == pytest.approx(
        sum(float((x - mean).square().sum()) for x in replicas) / workers
    )
    whole = 0.1**2 * float(taken.dot(taken))
    parts = told["noise_strength"] + (0.1 * share) ** 2 * float(at_mean.dot(at_mean))
    assert parts == pytest.approx(whole), "what acts along the gradient, and what is left, is the step"


@given(seed=st.integers(0, 99), scale=st.sampled_from([0.5, 4.0]))
def test_it_does_not_depend_on_the_scale_of_the_loss_and_noise_does_quadratically(
    seed: int, scale: float
) -> None:
    """On the same replicas: measured before the first step, from a start that differs by worker."""

    def start(rank: int) -> Tensor:
        return torch.linspace(-1, 1, SIZE, dtype=torch.float64) * (rank + 1)

    plain, scaled = (
        measured(Crew(DPSGD(measure_every=1), 3, gradient, initial=start).run(1))
        for gradient in (noisy(seed), lambda rank, t, x: scale * noisy(seed)(rank, t, x))
    )
    assert scaled["effective_lr"] == pytest.approx(plain["effective_lr"])
    assert scaled["noise_strength"] == pytest.approx(scale**2 * plain["noise_strength"])


@pytest.mark.parametrize("order", ["combine_then_adapt", "adapt_then_combine"])
def test_equal_replicas_and_equal_curvature_have_the_whole_learning_rate(order: Any) -> None:
    complete = Crew(DPSGD("complete", "adapt_then_combine", measure_every=1), 4, noisy(1))
    for _ in range(5):
        told = measured(complete.run(1))
        assert told["effective_lr"] == pytest.approx(1.0)
        assert told["weight_variance"] == pytest.approx(0.0, abs=1e-20)
        assert told["noise_strength"] == pytest.approx(0.0, abs=1e-12)

    def alike(rank: int, iteration: int, x: Tensor) -> Tensor:
        return 0.5 * (x - rank)

    ring = Crew(DPSGD("ring", order, measure_every=1), 5, alike)
    for _ in range(5):
        assert measured(ring.run(1))["effective_lr"] == pytest.approx(1.0)


@pytest.mark.parametrize("overlap", [False, True])
@given(seed=st.integers(0, 99), every=st.integers(1, 3))
def test_to_measure_changes_nothing_in_training(overlap: bool, seed: int, every: int) -> None:
    one, other = (
        Crew(DPSGD(overlap=overlap, measure_every=measure), 4, noisy(seed), seed=seed, optimizer=momentum)
        for measure in (0, every)
    )
    for mine, theirs in zip(one.run(7).parameters(), other.run(7).parameters(), strict=True):
        assert torch.equal(mine, theirs)


@given(seed=st.integers(0, 99), dies=st.integers(0, 6))
def test_the_others_go_on_measuring_when_one_dies(seed: int, dies: int) -> None:
    crew = Crew(DPSGD("matching", measure_every=2), 4, noisy(seed), seed=seed).run(8, dies={2: dies})
    assert len(crew.living) == 3
    assert all(bool(torch.isfinite(x).all()) for x in crew.parameters())


def test_where_the_gradient_at_the_mean_is_nothing_no_rate_is_told() -> None:
    crew = Crew(DPSGD(measure_every=1), 3, nothing).run(2)
    assert all(not worker.me.told for worker in crew.workers)


def test_who_measures_computes_a_batch_twice_and_nobody_else_does() -> None:
    assert [DPSGD(measure_every=every).probes for every in (0, 1, 2)] == [False, True, True]
