"""D-PSGD as its paper has it: a worker waits for its neighbours, and for nobody else."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.core.meeting import Call, Meeting
from paceline.protocols.core.topology import Topology, parse_graph
from paceline.protocols.peer.dpsgd import DPSGD
from paceline.protocols.settings import make_peer
from paceline.sim import Cluster, Lognormal, simulate_peers
from support.peers import Crew
from support.problems import SIZE, Gradient, noisy, nothing

close = torch.testing.assert_close
KINDS = ["ring", "exponential", "one_peer", "matching", "complete", "graph"]
GRAPH = "0-1,1-2,2-3,0-4,1-4,4-5:0.2,5-6,6-7"
FORMS: list[dict[str, Any]] = [{}, {"overlap": False}, {"order": "adapt_then_combine"}]
kinds = st.sampled_from(KINDS)
forms = st.sampled_from(FORMS)
seeds = st.integers(0, 999)


def protocol(kind: Any, **more: Any) -> DPSGD:
    return DPSGD(topology=kind, graph=GRAPH if kind == "graph" else "", **more)


def scattered(rank: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


# -- members that are absent from a step ---------------------------------------------------------------


@given(
    kind=kinds,
    members=st.sets(st.integers(0, 9), min_size=1),
    absent=st.sets(st.integers(0, 9), max_size=4),
    step=st.integers(0, 9),
)
def test_without_those_who_are_absent_rows_and_columns_still_sum_to_one(
    kind: Any, members: set[int], absent: set[int], step: int
) -> None:
    topology = Topology(kind, 3, parse_graph(GRAPH))
    whole, rows = (topology.rows(sorted(members), step, gone) for gone in ((), absent))
    there = sorted(members - absent)
    assert list(rows) == there
    w = np.array([[rows[j].get(k, 0.0) for k in there] for j in there]).reshape(len(there), len(there))
    assert w.min(initial=0) >= 0
    np.testing.assert_allclose(w.sum(0), 1, atol=1e-12)
    np.testing.assert_allclose(w.sum(1), 1, atol=1e-12)
    untouched = [rank for rank in there if not whole[rank].keys() & absent]
    assert all(rows[rank] == whole[rank] for rank in untouched), "they may have mixed already"


def test_a_ring_closes_around_one_that_is_absent() -> None:
    rows = Topology("ring").rows(range(5), 0, {2})
    assert rows == Topology("ring").rows([0, 1, 3, 4], 0)


# -- who waits for whom ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_on_a_ring_who_is_further_from_a_late_one_goes_on_for_longer(form: dict[str, Any]) -> None:
    """Rank 0 never comes: its neighbours wait, theirs do one iteration, and so on."""
    crew = Crew(DPSGD(**form), 9, noisy(0))
    for worker in crew.workers[1:]:
        worker.goal = 9
    while runnable := [worker for worker in crew.workers if worker.runnable]:
        crew.random.choice(runnable).turn()
    assert [worker.me.count for worker in crew.workers] == [0, 0, 1, 2, 3, 3, 2, 1, 0]


@given(kind=kinds, form=forms, ahead=st.integers(0, 2), seed=seeds)
def test_nobody_gets_further_ahead_of_the_slowest_than_it_may(
    kind: Any, form: dict[str, Any], ahead: int, seed: int
) -> None:
    """One worker does not come for a while, at a time drawn at random. Steps that a worker may be ahead of
    the slowest are counted when it comes to them: it has completed as many iterations, or one more."""
    crew, random = Crew(protocol(kind, ahead=ahead, **form), 8, noisy(0), seed=seed), Random(seed)
    late, until = random.randrange(8), random.randrange(200)
    for worker in crew.workers:
        worker.goal = 8
    for turn in range(2000):
        runnable = [w for w in crew.workers if w.runnable and (w.me.rank != late or turn > until)]
        if not runnable and turn > until:
            break
        if runnable:
            random.choice(runnable).turn()
        counts = [worker.me.count for worker in crew.workers]
        assert max(counts) - min(counts) <= ahead + 1
    assert {worker.me.count for worker in crew.workers} == {8}


def uneven(made: DPSGD, gradient: Gradient, seed: int, order: int = 0) -> Crew:
    """Some have one iteration more than the others, as where the last round is not full."""
    crew = Crew(made, 8, gradient, seed=seed, initial=scattered)
    crew.random.seed(order)
    goals = {w.me.rank: 4 + Random(f"{seed}/{w.me.rank}").randrange(2) for w in crew.workers}
    left: set[int] = set()
    for worker in crew.workers:
        worker.goal = goals[worker.me.rank]
    while there := [w for w in crew.workers if w.me.rank not in left and not w.asleep]:
        worker = crew.random.choice(there)
        if worker.me.count < worker.goal:
            worker.turn()
            continue
        left.add(worker.me.rank)
        for gathered in crew.meeting.leave(worker.me.rank):
            crew.carry_out(gathered)
    assert len(left) == 8, "somebody waits for ever"
    return crew


@given(kind=kinds, form=forms, seed=seeds, ahead=st.integers(0, 3))
def test_where_the_last_round_is_not_full_the_order_of_events_changes_no_bit(
    kind: Any, form: dict[str, Any], seed: int, ahead: int
) -> None:
    made = protocol(kind, ahead=ahead, **form)
    runs = [uneven(made, noisy(seed), seed, order).parameters() for order in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@given(kind=kinds, form=forms, seed=seeds)
def test_mixing_leaves_the_mean_of_all_who_took_part_though_some_end_earlier(
    kind: Any, form: dict[str, Any], seed: int
) -> None:
    crew = uneven(protocol(kind, **form), nothing, seed)
    close(crew.mean(), torch.stack([scattered(rank) for rank in range(8)]).mean(0))


# -- losses ----------------------------------------------------------------------------------------------


@given(kind=kinds, seed=seeds, ahead=st.integers(0, 3))
def test_after_a_loss_columns_of_the_living_sum_to_one_from_the_first_step_it_has_not_come_to(
    kind: Any, seed: int, ahead: int
) -> None:
    """Seen in what the meeting place answers, over random arrivals, with a worker lost at any moment."""
    random, meeting, topology = Random(seed), Meeting(), Topology(kind, 3, parse_graph(GRAPH))
    steps, at, asleep = {}, dict.fromkeys(range(8), 0), set()
    victim, dies = random.randrange(8), random.randrange(40)
    for rank in at:
        meeting.join(rank)
    for turn in range(400):
        free = [rank for rank in at if rank not in asleep and at[rank] < 6]
        if turn == dies:
            answered = meeting.leave(victim)
            came = at.pop(victim) + (victim in asleep)
            asleep.discard(victim)
        elif free:
            rank = random.choice(free)
            asleep.add(rank)
            answered = meeting.arrive(rank, Call("mix", topology=topology, step=at[rank], ahead=ahead))
        else:
            answered = []
        for each in answered:
            (rank,) = each.receivers
            steps.setdefault(each.step, {})[rank] = each.rows[rank]
            asleep.discard(rank)
            at[rank] += 1
    assert set(at.values()) == {6}, "somebody waits for ever"
    for step, rows in steps.items():
        assert all(sum(row.values()) == pytest.approx(1) for row in rows.values())
        if step >= came:
            taken = [sum(row.get(rank, 0.0) for row in rows.values()) for rank in at]
            assert taken == pytest.approx([1.0] * 7)
            assert all(victim not in row for row in rows.values())


# -- times, simulated ------------------------------------------------------------------------------------


def took_s(**settings: Any) -> float:
    on = Cluster(workers=32, compute=Lognormal(0.3, 0.3))
    return simulate_peers(make_peer("dpsgd", settings), on, iterations=40).now


def test_times_that_vary_cost_less_where_only_neighbours_are_awaited() -> None:
    """Nobody waits for 63 others in every iteration, nor for its neighbours' gradients."""
    paper, barrier = took_s(), took_s(overlap=False, ahead=0)
    assert paper < 0.7 * barrier
    assert paper < took_s(overlap=False) < 0.85 * barrier
    assert took_s(ahead=100) == pytest.approx(paper, rel=0.01), "the bound costs nothing here"


def test_a_negative_lead_is_refused() -> None:
    with pytest.raises(ConfigError, match="ahead is a number of steps >= 0, got -1"):
        DPSGD(ahead=-1)
