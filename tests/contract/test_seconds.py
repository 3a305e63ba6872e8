"""Every second of every worker is on record once: compute + wait + exchange is the time it took part."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocols import PACED, PEERS
from paceline.protocols.settings import make, make_peer
from paceline.sim import Cluster, Fixed, Link, Lognormal, Membership, simulate, simulate_peers
from paceline.trace.events import AnyEvent
from support.account import unbooked_s
from support.tight import TIGHT

PEER_RUNS: list[tuple[str, dict[str, Any]]] = [
    *((name, TIGHT.get(name, {})) for name in sorted(PEERS.keys() - {"selsync"})),
    ("osp", {"overlap": 1.0, "ramp": "constant", "rank_every": 1, "small_bytes": 0, "budget": "measured"}),
    ("hpsgd", {}),
    ("dpsgd", {"overlap": True}),
    ("osp", {"overlap": 1.0, "ramp": "constant", "rank_every": 2, "small_bytes": 0, "budget": "times"}),
    ("dpsgd", {"topology": "matching"}),
    ("easgd", {"period": 2, "mode": "asynchronous"}),
    ("fedavg", {"period": 3, "fraction": 0.5}),
    ("local_sgd", {"period": 2, "optimizer": "average"}),
]
"""All whose decisions do not hang on values, and further ways to overlap."""
LOST = st.dictionaries(st.integers(1, 3), st.floats(0, 9), max_size=2)


def cluster(sigma: float, link_s: float, deaths: dict[int, float]) -> Cluster:
    lost = tuple(Membership(at_s, kill=rank) for rank, at_s in deaths.items())
    link, compute = Link(latency_s=link_s, bandwidth_bytes_per_s=1e6), Lognormal(1.0, sigma)
    return Cluster(
        workers=4, compute=compute, slow={3: 4.0}, model_bytes=400_000, link=link, batch=2, event=lost
    )


@pytest.mark.parametrize("variant", PEER_RUNS, ids=lambda v: "-".join([v[0], *map(str, v[1].values())]))
@given(
    sigma=st.sampled_from([0.0, 0.5]), link_s=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 9), deaths=LOST
)
def test_the_seconds_of_simulated_peers_add_up(
    variant: tuple[str, dict[str, Any]], sigma: float, link_s: float, seed: int, deaths: dict[int, float]
) -> None:
    events: list[AnyEvent] = []
    on, protocol = cluster(sigma, link_s, deaths), make_peer(*variant)
    tally = simulate_peers(protocol, on, iterations=7, seed=seed, trace=events.append)
    left = unbooked_s(events)
    compute_cut_off = [rank in deaths for rank in range(4)]
    for rank, unbooked in enumerate(left):
        assert unbooked >= -1e-9
        assert compute_cut_off[rank] or unbooked == pytest.approx(0.0, abs=1e-9)
    summed = simulate_peers(protocol, on, iterations=7, seed=seed, summarise=True)
    assert summed.result().waiting_share == pytest.approx(tally.result().waiting_share)
    assert [summed.travel_s[rank] for rank in range(4)] == pytest.approx(
        [tally.travel_s[rank] for rank in range(4)]
    )


@pytest.mark.parametrize("name", sorted(PACED))
@given(sigma=st.sampled_from([0.0, 0.5]), link_s=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 9))
def test_the_seconds_of_simulated_workers_with_a_store_add_up(
    name: str, sigma: float, link_s: float, seed: int
) -> None:
    """A store that takes no time: one that does keeps workers in line, which is not told apart."""
    events: list[AnyEvent] = []
    simulate(make(name), cluster(sigma, link_s, {}), iterations=7, seed=seed, trace=events.append)
    assert unbooked_s(events) == pytest.approx([0.0] * 4, abs=1e-9)


@pytest.mark.parametrize("settings", [{}, {"overlap": 1.0, "ramp": "constant", "rank_every": 1}])
def test_what_osp_waits_for_the_slow_worker_is_on_record(settings: dict[str, Any]) -> None:
    """Three of four workers spend three quarters of their time on the fourth, whatever is put off."""
    on = Cluster(workers=4, compute=Fixed(1.0), slow={3: 4.0}, model_bytes=400_000, link=Link())
    shares = simulate_peers(make_peer("osp", settings), on, iterations=100).result().waiting_share
    assert shares == pytest.approx([0.75, 0.75, 0.75, 0.0], abs=1e-9)
