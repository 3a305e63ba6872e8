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
from paceline.protocols.psp_distributed import PeerBarrier

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
    saved = msgspec.json.decode(msgspec.json.encode((barrier.looks, barrier.lagging)))
    again = PeerBarrier(0, sample=4)
    again.looks, again.lagging = saved
    assert again == barrier
    assert again.whom_to_ask(MEMBERS) == barrier.whom_to_ask(MEMBERS)


@pytest.mark.parametrize("settings", [{"sample": -1}, {"staleness": -1}, {"poll_s": 0.0}])
def test_impossible_settings_are_refused_with_their_value(settings: dict[str, Any]) -> None:
    (name, value), *_ = settings.items()
    with pytest.raises(ConfigError, match=f"{name}.*{value}"):
        PeerBarrier(0, **settings)
