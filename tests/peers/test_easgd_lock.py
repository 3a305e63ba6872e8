"""Elastic averaging without a lock: what others write between reading and writing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols.core.operations import CENTRE
from paceline.protocols.peer.easgd import EASGD
from support.peers import Crew
from support.problems import SIZE, noisy, nothing

close = torch.testing.assert_close
START = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
seeds, rates = st.integers(0, 50), st.floats(0.01, 1)


def spring(**settings: float) -> EASGD:
    return EASGD(period=1, mode="asynchronous", **settings)  # type: ignore[arg-type]


def unlocked(**settings: float) -> EASGD:
    return EASGD(period=1, mode="asynchronous", lock=False, **settings)  # type: ignore[arg-type]


def whole_iteration(crew: Crew, rank: int) -> None:
    worker = crew.workers[rank]
    worker.goal += 1
    while worker.runnable:
        worker.turn()


def one_after_another(protocol: EASGD, rounds: int, seed: int) -> Crew:
    """Everybody has its whole iteration before the next begins."""
    crew = Crew(protocol, 3, noisy(seed), seed=seed)
    for _ in range(rounds):
        for rank in range(3):
            whole_iteration(crew, rank)
    return crew


@given(alpha=rates)
def test_without_a_lock_what_was_written_since_the_centre_was_read_is_lost(alpha: float) -> None:
    crew = Crew(unlocked(alpha=alpha), 2, nothing, initial=lambda rank: START * (2 + rank))
    while not crew.counts["exchange"]:
        crew.workers[0].turn()  # it has read
    whole_iteration(crew, 1)
    begun = START * 2  # cells begin as rank 0
    close(crew.cells[CENTRE][0], (1 - alpha) * begun + alpha * START * 3)
    whole_iteration(crew, 0)
    close(crew.cells[CENTRE][0], begun)
    close(crew.parameters()[1], (1 - alpha) * START * 3 + alpha * begun)


@given(seed=seeds, alpha=rates, share=rates)
def test_without_a_lock_exchanges_that_do_not_overlap_are_the_same_bit_for_bit(
    seed: int, alpha: float, share: float
) -> None:
    dials = {"alpha": alpha, "server_factor": share / alpha}
    one, other = (one_after_another(each, 4, seed) for each in (spring(**dials), unlocked(**dials)))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert torch.equal(one.cells[CENTRE][0], other.cells[CENTRE][0])


def scattered_crew(lock: bool, workers: int, seed: int, alpha: float) -> Crew:
    protocol = spring(alpha=alpha) if lock else unlocked(alpha=alpha)
    return Crew(protocol, workers, nothing, seed=seed, initial=lambda rank: START * (rank + 1))


@given(workers=st.integers(1, 5), seed=seeds, alpha=rates, lock=st.booleans())
def test_with_or_without_a_lock_all_stay_within_the_values_they_began_with(
    workers: int, seed: int, alpha: float, lock: bool
) -> None:
    crew = scattered_crew(lock, workers, seed, alpha).run(6)
    low, high = START.minimum(START * workers), START.maximum(START * workers)
    for x in [*crew.parameters(), crew.cells[CENTRE][0]]:
        assert (x >= low - 1e-12).all()
        assert (x <= high + 1e-12).all()


@pytest.mark.parametrize("lock", [True, False])
def test_without_gradients_all_come_to_one_value_with_or_without_a_lock(lock: bool) -> None:
    crew = scattered_crew(lock, 3, 1, 0.3).run(200)
    for x in crew.parameters():
        close(x, crew.cells[CENTRE][0])


@given(workers=st.integers(1, 5), seed=seeds, alpha=rates)
def test_with_the_lock_the_changes_of_replicas_and_centre_balance(
    workers: int, seed: int, alpha: float
) -> None:
    crew = scattered_crew(True, workers, seed, alpha)
    before = torch.stack([*crew.parameters(), crew.cells[CENTRE][0]]).sum(0)
    crew.run(5)
    close(torch.stack([*crew.parameters(), crew.cells[CENTRE][0]]).sum(0), before)


def test_without_the_lock_they_do_not_where_exchanges_overlap() -> None:
    crew = scattered_crew(False, 4, 0, 0.5)
    before = torch.stack([*crew.parameters(), crew.cells[CENTRE][0]]).sum(0)
    crew.run(5)
    after = torch.stack([*crew.parameters(), crew.cells[CENTRE][0]]).sum(0)
    assert (after - before).abs().max() > 0.1


def test_without_a_lock_an_exchange_moves_as_many_bytes() -> None:
    one, other = (Crew(each, 2, noisy(0)).run(3) for each in (spring(), unlocked()))
    assert one.sent == other.sent


def test_that_updates_are_lost_without_a_lock_is_said_at_the_start() -> None:
    (text,) = unlocked().remarks(4)
    assert "lock=false loses updates" in text
    assert len(unlocked(alpha=0.5).remarks(4)) == 2
    assert not spring().remarks(4)


@pytest.mark.parametrize("mode", ["synchronous", "downpour"])
def test_without_a_lock_is_refused_where_nobody_exchanges_alone(mode: Any) -> None:
    with pytest.raises(ConfigError, match=f"lock=false is for mode=asynchronous, got mode={mode}"):
        EASGD(mode=mode, lock=False)
