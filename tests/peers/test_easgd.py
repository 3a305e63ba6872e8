"""Elastic averaging: what the spring takes from one end it gives to the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.peer.easgd import EASGD
from support.peers import Crew
from support.problems import SIZE, large_batch, noisy, nothing

close = torch.testing.assert_close


def scattered(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64)


def loosely_tied(beta: float, workers: int) -> Crew:
    """Replicas anywhere, the centre of all at rank 0's."""
    crew = Crew(EASGD(period=1, beta=beta), workers, nothing, initial=scattered)
    crew.run(0)
    for worker in crew.workers:  # the first exchange sets the centre up from each one's own replica
        worker.turn()
        worker.me.agreed.snapshot[:] = crew.workers[0].me.parameters
    return crew


def total(crew: Crew) -> Tensor:
    return torch.stack(crew.parameters()).sum(0) + crew.models()[0]


@given(beta=st.floats(0, 1), workers=st.integers(1, 6))
def test_without_gradients_the_sum_of_replicas_and_centre_is_conserved(beta: float, workers: int) -> None:
    crew = loosely_tied(beta, workers)
    before = total(crew)
    for _ in range(4):
        crew.run(1)
        close(total(crew), before)


@given(beta=st.floats(0.05, 1), workers=st.integers(2, 6))
def test_distances_shrink_as_the_theory_says(beta: float, workers: int) -> None:
    crew, alpha = loosely_tied(beta, workers), beta / workers
    replicas, centre, mean = crew.parameters(), crew.models()[0], crew.mean()
    crew.run(1)
    for before, after in zip(replicas, crew.parameters(), strict=True):
        close(after - crew.mean(), (1 - alpha) * (before - mean))
    close(crew.mean() - crew.models()[0], (1 - alpha - beta) * (mean - centre))
    assert not crew.equal()


def test_with_beta_one_the_centre_becomes_the_mean() -> None:
    crew = loosely_tied(1.0, 4)
    mean = crew.mean()
    crew.run(1)
    close(crew.models()[0], mean)


@given(workers=st.integers(1, 5), seed=st.integers(0, 50))
def test_with_beta_zero_everybody_is_alone_and_the_centre_stays(workers: int, seed: int) -> None:
    crew = Crew(EASGD(beta=0.0, period=2), workers, noisy(seed), seed=seed).run(6)
    for rank, x in enumerate(crew.parameters()):
        close(x, large_batch(1, 6, lambda _, i, at, rank=rank: noisy(seed)(rank, i, at)))
    close(crew.models()[0], torch.linspace(-1, 1, SIZE, dtype=torch.float64))


@given(workers=st.integers(1, 5), seed=st.integers(0, 50))
def test_it_follows_the_papers_synchronous_equations(workers: int, seed: int) -> None:
    """All right-hand sides at step t: an independent loop over plain tensors."""
    beta, eta = 0.9, 0.1
    x = [torch.linspace(-1, 1, SIZE, dtype=torch.float64) for _ in range(workers)]
    c = x[0].clone()
    for t in range(7):
        old, centre = [each.clone() for each in x], c.clone()
        for i in range(workers):
            x[i] = old[i] - eta * noisy(seed)(i, t, old[i])
            if t % 3 == 0:
                x[i] = x[i] - beta / workers * (old[i] - centre)
        if t % 3 == 0:
            c = centre + beta / workers * sum(each - centre for each in old)
    crew = Crew(EASGD(period=3, beta=beta), workers, noisy(seed), seed=seed).run(7)
    close(crew.parameters(), x)
    assert all(torch.equal(crew.models()[0], model) for model in crew.models())
    close(crew.models()[0], c)


def test_the_first_exchange_is_in_the_first_iteration() -> None:
    crew = Crew(EASGD(period=5), 2, noisy(0))
    exchanges = []
    for _ in range(11):
        before = crew.counts["average"]
        crew.run(1)
        exchanges.append(crew.counts["average"] - before)
    assert exchanges == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("beta", [-0.1, 1.5])
def test_a_beta_that_overshoots_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match=r"beta must be in \[0, 1\]"):
        EASGD(beta=beta)
