"""Peers in virtual time: what an exchange costs, who waits for whom."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols import PEERS
from paceline.protocols.rules.compression import parse_compression
from paceline.protocols.settings import make_peer
from paceline.sim import Cluster, Fixed, Link, Lognormal, Membership, simulate_peers
from paceline.sim.costs import ring_s
from paceline.trace.events import AnyEvent, Exchanged, WorkerLeft
from support.peers import Crew
from support.problems import nothing
from support.tight import TIGHT

TIMED = sorted(PEERS.keys() - {"selsync"})
LINK = Link(latency_s=0.001, bandwidth_bytes_per_s=1e6)


def cluster(workers: int = 4, **more: Any) -> Cluster:
    return Cluster(**{"workers": workers, "compute": Fixed(1.0), "model_bytes": 100_000, "link": LINK} | more)


def trace(protocol: Any, on: Cluster, **more: Any) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    simulate_peers(protocol, on, trace=events.append, **{"iterations": 8, **more})
    return events


def test_a_ring_sends_two_n_minus_one_messages_of_an_nth() -> None:
    assert ring_s([LINK] * 5, 100_000) == pytest.approx(8 * (0.001 + 20_000 / 1e6))
    assert ring_s([LINK], 100_000) == 0
    slow = Link(latency_s=0.0, bandwidth_bytes_per_s=1e3)
    assert ring_s([LINK, slow], 100_000) == pytest.approx(2 * 50_000 / 1e3)


def test_allreduce_takes_the_slowest_compute_and_a_ring_per_iteration() -> None:
    tally = simulate_peers(make_peer("allreduce"), cluster(slow={2: 3.0}), iterations=10)
    assert tally.now == pytest.approx(10 * (3 + ring_s([LINK] * 4, 100_000)))
    waits = tally.result().waiting_share
    assert waits[2] == 0
    assert waits[0] == pytest.approx(20 / tally.now)


@pytest.mark.parametrize("period", [1, 2, 5])
def test_local_sgd_pays_for_a_ring_once_per_period(period: int) -> None:
    on = cluster(slow={1: 2.0})
    tally = simulate_peers(make_peer("local_sgd", {"period": period}), on, iterations=10)
    assert tally.now == pytest.approx(20 + 10 / period * ring_s([LINK] * 4, 100_000))
    assert tally.result().bytes_sent == 10 // period * 4 * 100_000


def test_averaging_seldom_absorbs_slowness_that_comes_and_goes() -> None:
    """A slow iteration here and there: with a period the waits overlap, in lockstep they add up."""
    on = cluster(8, compute=Lognormal(1.0, 0.5))
    often, seldom = (
        simulate_peers(make_peer("local_sgd", {"period": period}), on, iterations=60).now
        for period in (1, 20)
    )
    assert seldom < 0.8 * often


STAR = {"topology": "graph", "graph": "0-1,0-2,0-3,0-4,0-5"}
"""Who takes from the middle waits while that sends to all."""


def test_mixing_costs_a_message_per_neighbour() -> None:
    for settings, messages in (({}, 2), ({"topology": "matching"}, 1), (STAR, 5)):
        protocol = make_peer("dpsgd", {"overlap": False, **settings})
        took = simulate_peers(protocol, cluster(6), iterations=5).now
        assert took == pytest.approx(5 * (1 + messages * LINK.seconds(100_000)))


@pytest.mark.parametrize(("size", "took"), [(250_000, 1.0), (1_000_000, 2.002)])
def test_mixing_beside_computing_costs_what_does_not_fit_beside_it(size: int, took: float) -> None:
    """Two messages of a quarter of a second hide behind a second of computing; two of a second do not."""
    on = cluster(6, model_bytes=size)
    tally = simulate_peers(make_peer("dpsgd", {"overlap": True}), on, iterations=5)
    assert tally.now == pytest.approx(5 * took)


def test_a_pair_does_not_wait_for_the_others() -> None:
    """In the first step those who are not matched with the slow one go on at once."""
    settings = {"topology": "matching", "overlap": False}
    events = trace(make_peer("dpsgd", settings), cluster(4, slow={0: 9.0}), iterations=1)
    pairs = [event for event in events if isinstance(event, Exchanged)]
    assert sorted(event.t for event in pairs) == [1.0, 1.0, 9.0, 9.0]


@pytest.mark.parametrize(("compute_s", "beside", "serial"), [(1.0, 2.0, 3.0), (3.0, 3.0, 5.0)])
def test_ad_psgd_takes_as_long_as_computing_or_an_exchange(
    compute_s: float, beside: float, serial: float
) -> None:
    """One second each way: whichever is longer counts, and both if they come one after the other."""
    link = Link(bandwidth_bytes_per_s=1e6)
    on = cluster(4, compute=Fixed(compute_s), model_bytes=1_000_000, link=link)
    for overlap, took in ((True, beside), (False, serial)):
        made = make_peer("ad_psgd", {"overlap": overlap})
        some, more = (simulate_peers(made, on, iterations=count).now for count in (5, 15))
        assert more - some == pytest.approx(10 * took)


@pytest.mark.parametrize("name", TIMED)
def test_the_operations_are_those_of_the_driver(name: str) -> None:
    protocol = make_peer(name, TIGHT.get(name, {}))
    met = [event.operation for event in trace(protocol, cluster()) if isinstance(event, Exchanged)]
    crew = Crew(protocol, 4, nothing).run(8).settle()
    assert {kind: met.count(kind) for kind in set(met)} == dict(crew.counts)


@pytest.mark.parametrize(
    ("name", "settings"), [("ad_psgd", {}), ("easgd", {"mode": "asynchronous"})], ids=["ad_psgd", "easgd"]
)
def test_where_nobody_waits_a_slow_worker_slows_nobody_down(name: str, settings: dict[str, Any]) -> None:
    """Three workers of one speed and one that takes four times as long: 3.25 iterations per compute time."""
    on = cluster(slow={3: 4.0}, link=Link())
    result = simulate_peers(make_peer(name, settings), on, iterations=100).result()
    assert result.samples == 400
    assert result.samples_per_s == pytest.approx(3.25, rel=0.02)
    assert result.waiting_share == [0, 0, 0, 0]
    dealt = simulate_peers(make_peer(name, settings), on, iterations=100, equal_shards=True)
    assert dealt.now == pytest.approx(400)


@pytest.mark.parametrize("name", TIMED)
@given(seed=st.integers(0, 99))
def test_same_seed_same_trace_and_summed_up_it_gives_the_same_result(name: str, seed: int) -> None:
    protocol, on = make_peer(name, TIGHT.get(name, {})), cluster(compute=Lognormal(1.0, 0.4))
    assert trace(protocol, on, seed=seed) == trace(protocol, on, seed=seed)
    whole = simulate_peers(protocol, on, iterations=8, seed=seed, summarise=False).result()
    summed = simulate_peers(protocol, on, iterations=8, seed=seed, summarise=True).result()
    assert summed.waiting_share == pytest.approx(whole.waiting_share)
    assert (summed.seconds, summed.samples, summed.bytes_sent) == (
        whole.seconds,
        whole.samples,
        whole.bytes_sent,
    )


@pytest.mark.parametrize("name", TIMED)
@given(deaths=st.dictionaries(st.integers(0, 3), st.floats(0, 9), max_size=3))
def test_whoever_is_lost_whenever_the_others_finish(name: str, deaths: dict[int, float]) -> None:
    lost = tuple(Membership(at_s, kill=rank) for rank, at_s in deaths.items())
    events = trace(make_peer(name, TIGHT.get(name, {})), cluster(event=lost))
    left = {event.worker: event.reason for event in events if isinstance(event, WorkerLeft)}
    assert {rank for rank, reason in left.items() if reason == "died"} <= set(deaths)
    assert {rank for rank, reason in left.items() if reason == "finished"} >= set(range(4)) - set(deaths)


@pytest.mark.parametrize(("length", "hidden"), [(1, False), (3, True)])
def test_hpsgd_hides_what_travels_within_a_round(length: int, hidden: bool) -> None:
    """A ring takes 2.5 times an iteration: it fits into three iterations, not into one."""
    slow = Link(bandwidth_bytes_per_s=1e5)
    on = cluster(2, link=slow, model_bytes=250_000)
    assert ring_s([slow] * 2, 250_000) == pytest.approx(2.5)
    took = simulate_peers(make_peer("hpsgd", {"round_length": length}), on, iterations=30).now
    rounds = 30 // length
    last = 2 * 2.5  # at the end: what is under way, then the rest
    assert took == pytest.approx(30 + last if hidden else 1 + (rounds - 1) * 2.5 + last)


def test_hpsgd_finds_its_round_length_by_itself() -> None:
    slow = Link(bandwidth_bytes_per_s=1e5)
    events = trace(make_peer("hpsgd"), cluster(2, link=slow, model_bytes=250_000), iterations=40)
    starts = [event.t for event in events if isinstance(event, Exchanged) and event.operation == "average"]
    rounds = [round(later - earlier) for earlier, later in pairwise(starts)]
    assert set(rounds[:-2]) == {3}


OVERLAPPED: dict[str, Any] = {"ramp": "constant", "rank_every": 1, "small_bytes": 0}


@pytest.mark.parametrize(("share", "took"), [(0.0, 2.6), (0.25, 2.2), (0.5, 1.8), (1.0, 1.6)])
def test_osp_hides_what_fits_beside_computing(share: float, took: float) -> None:
    """A second of computing, 1.6 seconds of averaging: max(1, f 1.6) + (1 - f) 1.6, and f = 5/8 is best."""
    on = cluster(2, link=Link(bandwidth_bytes_per_s=1e5), model_bytes=160_000)
    protocol = make_peer("osp", {"overlap": share, **OVERLAPPED})
    some, more = (simulate_peers(protocol, on, iterations=count).now for count in (10, 30))
    assert more - some == pytest.approx(20 * took)


@pytest.mark.parametrize("summarise", [False, True])
def test_a_result_tells_what_share_of_the_bytes_osp_put_off(summarise: bool) -> None:
    """Half of the model in all iterations but the first, which nothing was ranked before."""
    on = cluster(model_bytes=128_000)
    told = {
        share: simulate_peers(
            make_peer("osp", {"overlap": share, **OVERLAPPED}), on, iterations=8, summarise=summarise
        ).result()
        for share in (0.0, 0.5, 1.0)
    }
    assert {share: each.sent_ahead for share, each in told.items()} == {0.0: 0.0, 0.5: 3.5 / 8, 1.0: 7 / 8}
    for name, ahead in (("allreduce", None), ("ad_psgd", 1.0)):
        result = simulate_peers(make_peer(name), on, iterations=8, summarise=summarise).result()
        assert result.sent_ahead == ahead


def test_osp_puts_off_as_much_as_the_link_carries_beside_computing() -> None:
    """Averaging takes four times as long as computing, so a quarter of it can be hidden."""
    on = cluster(2, link=Link(bandwidth_bytes_per_s=1e5), model_bytes=400_000)
    events = trace(make_peer("osp", {"budget": "measured", **OVERLAPPED}), on, iterations=80)
    sizes = [e.bytes for e in events if isinstance(e, Exchanged) and e.operation == "average"][-60:]
    late = [min(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True)]
    assert all(0.2 * 400_000 < size <= 0.29 * 400_000 for size in late)


def test_osp_computes_what_it_puts_off_from_the_times_of_the_first_iterations() -> None:
    """The same link: nine tenths of a quarter, in tensors of a hundredth, and nobody ever waits for it."""
    on = cluster(2, link=Link(bandwidth_bytes_per_s=1e5), model_bytes=400_000)
    events = trace(make_peer("osp", {"budget": "times", **OVERLAPPED}), on, iterations=20)
    sizes = [e.bytes for e in events if isinstance(e, Exchanged) and e.operation == "average"][-20:]
    late = {min(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True)}
    assert all(0.21 * 400_000 < size <= 0.225 * 400_000 for size in late)


def test_osp_cannot_know_a_loss_here() -> None:
    with pytest.raises(ConfigError, match="use ramp=linear"):
        simulate_peers(make_peer("osp", {"ramp": "loss", "ramp_length": 2}), cluster(), iterations=3)


def test_what_depends_on_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="decides by the values of its gradients"):
        simulate_peers(make_peer("selsync"), cluster(), iterations=3)


def test_patterns_that_cannot_work_are_refused_here_too() -> None:
    with pytest.raises(ConfigError, match="7 workers make no grid"):
        simulate_peers(make_peer("ds_sync"), cluster(7), iterations=3)


@pytest.mark.long
def test_a_thousand_workers_mix() -> None:
    on = cluster(1000, compute=Lognormal(1.0, 0.2))
    tally = simulate_peers(make_peer("dpsgd", {"topology": "one_peer"}), on, iterations=20)
    assert tally.result().samples == 20_000


# -- compression ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fp16", "bf16"])
def test_half_the_bytes_take_half_the_time_on_the_wire(way: str) -> None:
    on = cluster(link=Link(bandwidth_bytes_per_s=1e6))
    plain = simulate_peers(make_peer("allreduce"), on, iterations=10)
    half = simulate_peers(make_peer("allreduce"), on, iterations=10, compress=parse_compression(way))
    assert half.now - 10 == pytest.approx((plain.now - 10) / 2)
    assert half.result().bytes_sent == 10 * 4 * 50_000
    assert half.result().bytes_sent_each == [10 * 50_000] * 4
    assert half.result().compress == way


@pytest.mark.parametrize(("way", "sent"), [("int8", 25_000 + 4 * 25), ("topk:0.01", 250 * 8)])
def test_what_does_not_add_up_has_to_reach_everybody(way: str, sent: int) -> None:
    on = cluster(5)
    tally = simulate_peers(make_peer("allreduce"), on, iterations=10, compress=parse_compression(way))
    assert tally.now == pytest.approx(10 * (1 + 4 * LINK.seconds(sent)))
    assert tally.result().bytes_sent == 10 * 5 * sent


@pytest.mark.parametrize("protocol", sorted({*TIMED} - {"ad_psgd"}))
def test_every_peer_is_simulated_with_compressed_bytes(protocol: str) -> None:
    """Also where an exchange is completed by somebody's end or death."""
    settings = TIGHT.get(protocol, {})
    lost = (Membership(2.5, kill=1),)
    sent = []
    for way in ("none", "fp16"):
        made = make_peer(protocol, settings)
        tally = simulate_peers(made, cluster(event=lost), iterations=8, compress=parse_compression(way))
        sent.append(sum(tally.exchanged_bytes.values()))
    votes = 100_000 if protocol in ("easgd", "fedavg") else 0
    assert sent[1] == pytest.approx(sent[0] / 2, abs=votes)


@pytest.mark.parametrize(
    ("protocol", "way", "words"),
    [
        ("dpsgd", "topk", "mixes models"),
        ("ds_sync", "int8", "in groups"),
        ("allreduce", "powersgd", "shapes"),
    ],
)
def test_what_cannot_be_compressed_is_refused_as_in_a_real_run(protocol: str, way: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate_peers(make_peer(protocol), cluster(), iterations=2, compress=parse_compression(way))


def test_a_period_that_follows_the_loss_is_refused_where_there_is_none() -> None:
    made = make_peer("easgd", {"mode": "asynchronous", "adaptive": True, "period": 2})
    with pytest.raises(ConfigError, match=r"goes by the training loss.* with its script"):
        simulate_peers(made, cluster(), iterations=8)
