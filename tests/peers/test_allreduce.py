"""All-reduce: one process with the batches of all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocols.peer.allreduce import AllReduce
from support.peers import Crew
from support.problems import MakeOptimizer, adam, large_batch, momentum, noisy, sgd


@pytest.mark.parametrize("optimizer", [sgd, momentum, adam])
@given(workers=st.integers(1, 6), seed=st.integers(0, 99))
def test_it_equals_one_process_with_the_large_batch_whatever_the_optimizer(
    optimizer: MakeOptimizer, workers: int, seed: int
) -> None:
    def samples(rank: int, iteration: int) -> int:
        return 1 + (rank + iteration) % 3

    crew = Crew(AllReduce(), workers, noisy(seed), seed=seed, optimizer=optimizer, samples=samples)
    for _ in range(6):
        assert crew.run(1).equal()
    torch.testing.assert_close(crew.parameters()[0], large_batch(workers, 6, noisy(seed), optimizer, samples))


@given(seed=st.integers(0, 99))
def test_the_order_in_which_workers_come_does_not_change_a_bit(seed: int) -> None:
    one, other = (Crew(AllReduce(), 4, noisy(1), seed=each).run(8) for each in (0, seed))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_others_go_on_with_the_mean_of_those_who_are_left() -> None:
    crew = Crew(AllReduce(), 3, noisy(2)).run(5, dies={0: 2})
    assert crew.equal()
    assert len(crew.living) == 2
