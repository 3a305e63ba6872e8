"""Probabilistic Synchronous Parallel without a middle: one worker's barrier, and peers that are asked."""

from __future__ import annotations

from collections import Counter
from math import comb, sqrt
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols import Pacing
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.psp import PSP
from paceline.protocols.paced.psp_distributed import PeerBarrier
from paceline.protocols.settings import make
from support.drive import Schedule, drive
from support.schedules import schedules

MEMBERS = range(8)


class Peers:
    """Peers at given clocks, and a record of who was asked."""

    def __init__(self, clocks: dict[int, int]) -> None:
        self.clocks = clocks
        self.asked: list[int] = []

    def __call__(self, rank: int) -> int:
        self.asked.append(rank)
        return self.clocks[rank]


clocks_of_peers = st.lists(st.integers(0, 5), min_size=8, max_size=8).map(lambda c: dict(enumerate(c)))


@given(
    clocks=clocks_of_peers,
    sample=st.integers(0, 9),
    staleness=st.integers(0, 2),
    resample=st.sampled_from(["fixed", "poll"]),
)
def test_a_worker_goes_on_exactly_when_nobody_it_asked_lags(
    clocks: dict[int, int], sample: int, staleness: int, resample: Any
) -> None:
    peers = Peers(clocks)
    passed = PeerBarrier(3, sample, staleness, resample).may_advance(clocks[3], MEMBERS, peers)
    assert len(set(peers.asked)) == len(peers.asked) == min(sample, 7)
    assert 3 not in peers.asked
    assert passed == all(clocks[3] - clocks[peer] <= staleness for peer in peers.asked)


def test_with_a_fixed_sample_only_those_who_lagged_are_asked_again() -> None:
    peers = Peers(dict.fromkeys(MEMBERS, 4))
    barrier = PeerBarrier(0, sample=5)
    assert not barrier.may_advance(5, MEMBERS, peers)
    first = peers.asked
    peers.asked, peers.clocks = [], peers.clocks | {first[0]: 5, first[3]: 6}
    assert not barrier.may_advance(5, MEMBERS, peers)
    assert peers.asked == first  # all had lagged
    peers.asked, peers.clocks = [], dict.fromkeys(MEMBERS, 5)
    assert barrier.may_advance(5, MEMBERS, peers)
    assert peers.asked == [first[1], first[2], first[4]]
    peers.asked = []
    assert barrier.may_advance(5, MEMBERS, peers)  # the next barrier: a new sample
    assert len(peers.asked) == 5


def test_when_polling_a_new_sample_is_asked_each_time() -> None:
    peers = Peers(dict.fromkeys(MEMBERS, 0))
    barrier = PeerBarrier(0, sample=2, resample="poll")
    for _ in range(200):
        assert not barrier.may_advance(1, MEMBERS, peers)
    seen = Counter(peers.asked)
    assert sum(seen.values()) == 400
    assert seen.keys() == set(MEMBERS) - {0}


def test_who_left_is_not_waited_for() -> None:
    peers = Peers(dict.fromkeys(MEMBERS, 0))
    barrier = PeerBarrier(0, sample=7)
    assert not barrier.may_advance(1, MEMBERS, peers)
    peers.clocks = {1: 1, 2: 1}
    assert barrier.may_advance(1, range(3), peers)


def test_one_look_passes_with_the_hypergeometric_probability() -> None:
    peers, looks = Peers({rank: int(rank < 6) for rank in MEMBERS}), 4000
    barrier = PeerBarrier(0, sample=3, resample="poll")
    passed = sum(barrier.may_advance(1, MEMBERS, peers) for _ in range(looks))
    q = comb(5, 3) / comb(7, 3)
    assert abs(passed - looks * q) < 4 * sqrt(looks * q * (1 - q))


def test_ranks_and_seeds_draw_samples_of_their_own_and_the_same_ones_again() -> None:
    def draws(rank: int, seed: int) -> list[list[int]]:
        barrier = PeerBarrier(rank, sample=3, resample="poll", seed=seed)
        return [barrier.whom_to_ask(range(100)) for _ in range(5)]

    assert draws(1, 0) == draws(1, 0)
    assert draws(1, 0) != draws(2, 0)
    assert draws(1, 0) != draws(1, 1)


def test_a_barrier_survives_saving_and_loading() -> None:
    peers = Peers(dict.fromkeys(MEMBERS, 0))
    barrier = PeerBarrier(0, sample=4)
    barrier.may_advance(1, MEMBERS, peers)
    again = msgspec.json.decode(msgspec.json.encode(barrier), type=PeerBarrier)
    assert again == barrier
    assert again.whom_to_ask(MEMBERS) == barrier.whom_to_ask(MEMBERS)


def test_a_share_of_the_sample_may_lag_if_so_set() -> None:
    clocks = {rank: int(rank < 5) for rank in MEMBERS}  # three of seven others lag
    for fraction, passes in ((1.0, False), (0.6, False), (4 / 7, True), (0.1, True)):
        barrier = PeerBarrier(0, sample=7, pass_fraction=fraction)
        assert barrier.may_advance(1, MEMBERS, clocks.__getitem__) is passes
    kept = PeerBarrier(0, sample=7, pass_fraction=0.6)  # two of all seven may
    assert not kept.may_advance(1, MEMBERS, clocks.__getitem__)
    assert kept.may_advance(1, MEMBERS, (clocks | {5: 1}).__getitem__)


@given(clocks=clocks_of_peers, sample=st.integers(0, 9), resample=st.sampled_from(["fixed", "poll"]))
def test_looks_and_questions_are_counted_barrier_by_barrier(
    clocks: dict[int, int], sample: int, resample: Any
) -> None:
    peers = Peers(clocks)
    barrier = PeerBarrier(3, sample, 0, resample)
    for mine in (clocks[3], clocks[3] + 1):
        peers.asked, looks = [], 1
        while not barrier.may_advance(mine, MEMBERS, peers):
            peers.clocks = {rank: clock + 1 for rank, clock in peers.clocks.items()}
            looks += 1
        assert (barrier.tries, barrier.asked) == (looks, len(peers.asked))


# Every worker with a barrier of its own, under the store that only adds up.


def apart(**settings: Any) -> PSP:
    return PSP(form="distributed", poll_s=0.25, **settings)


def starts(protocol: Pacing, schedule: Schedule) -> list[tuple[float, int, int]]:
    """When which worker starts an iteration, and which version it reads."""
    return [
        (step.now, worker, step.decision.version)
        for step in drive(protocol, schedule)
        for worker in step.released
    ]


@given(schedule=schedules(churn=False), resample=st.sampled_from(["event", "fixed"]))
def test_who_asks_nobody_starts_when_it_would_under_asp(schedule: Schedule, resample: Any) -> None:
    """Versions may differ among those who push at the same moment."""
    one, other = (
        sorted((now, worker) for now, worker, _ in starts(protocol, schedule))
        for protocol in (apart(sample=0, resample=resample), ASP())
    )
    assert one == other


@given(schedule=schedules(), staleness=st.integers(0, 2), resample=st.sampled_from(["event", "fixed"]))
def test_who_asks_all_others_is_never_further_ahead_than_the_staleness(
    schedule: Schedule, staleness: int, resample: Any
) -> None:
    """Kept samples know nothing of those who join later."""
    joined = False
    for step in drive(apart(sample=99, staleness=staleness, resample=resample), schedule):
        joined |= step.event == "join" and step.now > 0
        if step.event == "passed" and not (joined and resample == "fixed"):
            assert step.gap(step.worker) <= staleness


@given(schedule=schedules(), sample=st.integers(0, 4), staleness=st.integers(0, 2))
def test_nobody_waits_longer_for_all_to_catch_up_than_until_its_next_look(
    schedule: Schedule, sample: int, staleness: int
) -> None:
    """Whom nobody lags behind any more, because they pushed, died or left, goes on at its next look."""
    free_since: dict[int, float] = {}
    for step in drive(apart(sample=sample, staleness=staleness), schedule):
        for worker in step.released:
            assert step.now - free_since.get(worker, step.now) <= 0.25
        free_since = {
            worker: free_since.get(worker, step.now)
            for worker in step.waiting
            if step.gap(worker) <= staleness
        }


def test_in_the_distributed_form_the_store_holds_nobody_and_lets_nobody_go() -> None:
    for step in drive(apart(sample=3), Schedule(workers=4, speeds=(1, 2, 7), deaths=((9, 3),))):
        assert bool(step.released) == (step.event == "passed")


def test_a_form_that_there_is_not_and_a_phase_of_it_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no form 'circular'\. Use central or distributed"):
        PSP(form="circular")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"phase 'psp\(form=distributed\)'.*form=central"):
        make("sync_switch", {"phases": "bsp@0.5,psp(form=distributed)"})


@pytest.mark.parametrize("settings", [{"sample": -1}, {"staleness": -1}, {"poll_s": 0.0}])
def test_impossible_settings_are_refused_with_their_value(settings: dict[str, Any]) -> None:
    (name, value), *_ = settings.items()
    with pytest.raises(ConfigError, match=f"{name}.*{value}"):
        PeerBarrier(0, **settings)
