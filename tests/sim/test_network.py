"""What travels between hosts that share links: by the formulas of a star, a ring and a store."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols import ASP, BSP, PEERS
from paceline.protocols.core.meeting import Call, Gathered
from paceline.protocols.rules.compression import Compression
from paceline.sim import Cluster, Fixed, Host, Link, load_cluster, simulate, simulate_peers
from paceline.sim.network.paced import StoreWays
from paceline.sim.network.peers import HostCosts

RATE, SIZE = 1e6, 1_000_000
HOSTS = st.integers(2, 8)


def cluster(hosts: list[Host], **more: object) -> Cluster:
    workers = sum(host.workers for host in hosts)
    return Cluster(workers=workers, compute=Fixed(1.0), model_bytes=SIZE, batch=8, host=tuple(hosts), **more)  # type: ignore[arg-type]


def alike(count: int, workers: int = 1) -> list[Host]:
    return [Host(workers=workers, bandwidth_bytes_per_s=RATE)] * count


def average(ranks: range, sent: int = SIZE, size: int = SIZE) -> Gathered:
    row = {rank: 1 / len(ranks) for rank in ranks}
    return Gathered("average", tuple(ranks), dict.fromkeys(ranks, row), size_bytes=size, sent_bytes=sent)


def meet(costs: HostCosts, gathered: Gathered, now: float = 0.0) -> dict[int, float]:
    for rank in gathered.receivers:
        costs.came(
            rank, Call("average", size_bytes=gathered.size_bytes, sent_bytes=gathered.given_bytes), now
        )
    return costs.joint(gathered, now)


@given(HOSTS)
def test_a_star_takes_all_other_vectors_in_and_as_many_out_over_the_first_hosts_link(count: int) -> None:
    spent = meet(HostCosts(cluster(alike(count)), Compression()), average(range(count)))
    assert spent[0] == pytest.approx((count - 1) * SIZE / RATE)
    ends = [spent[rank] for rank in range(1, count)]
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(2 * (count - 1) * SIZE / RATE)


@given(HOSTS)
def test_a_ring_takes_two_vectors_but_for_a_share_whatever_the_number_of_hosts(count: int) -> None:
    spent = meet(HostCosts(cluster(alike(count), fabric="ring"), Compression()), average(range(count)))
    assert list(spent.values()) == pytest.approx([2 * (count - 1) / count * SIZE / RATE] * count)


@given(HOSTS, st.integers(1, 4))
def test_an_average_travels_to_a_host_once_whatever_its_number_of_workers(count: int, workers: int) -> None:
    costs = HostCosts(cluster(alike(count, workers)), Compression())
    spent = meet(costs, average(range(count * workers)))
    vectors_in, copies_out = (count - 1) * workers, count - 1
    assert spent[count * workers - 1] == pytest.approx((vectors_in + copies_out) * SIZE / RATE)


def test_compressed_summands_of_other_hosts_are_sent_if_they_are_less_than_the_average() -> None:
    for sent, answer in ((SIZE // 10, 2 * SIZE // 10), (SIZE // 2, SIZE)):
        costs = HostCosts(cluster(alike(3)), Compression())
        assert meet(costs, average(range(3), sent))[2] == pytest.approx((2 * sent + 2 * answer) / RATE)


def test_what_travels_while_others_compute_is_not_waited_for() -> None:
    """A slow link that had time enough adds nothing to the others' wait, and delays only its own host."""
    hosts = [*alike(2), Host(bandwidth_bytes_per_s=RATE / 10)]
    costs = HostCosts(cluster(hosts), Compression())
    call = Call("average", size_bytes=SIZE, sent_bytes=SIZE)
    costs.came(2, call, 0.0)
    costs.came(0, call, 20.0)
    costs.came(1, call, 20.0)
    spent = costs.joint(average(range(3)), 20.0)
    assert spent[0] == pytest.approx(1.0)
    assert spent[1] == pytest.approx(1.0 + 1 / 0.9)
    assert spent[2] == pytest.approx(1.0 + 10.0)


def test_what_a_neighbour_has_brought_is_under_way_for_all_who_take_of_it() -> None:
    """Rank 2's vector takes ten seconds. Who takes it second waits for it too; one that rank 2 brings to the
    next step meanwhile is another."""
    costs = HostCosts(cluster([*alike(2), Host(bandwidth_bytes_per_s=RATE / 10)]), Compression())
    sizes: dict[str, Any] = {"size_bytes": SIZE, "sent_bytes": SIZE, "step": 4}
    first, second = (
        Gathered("mix", (rank,), {rank: {rank: 0.5, 2: 0.5}}, **sizes, last=rank == 1) for rank in (0, 1)
    )
    brought, later = (Call("mix", **sizes | {"step": step}) for step in (4, 5))
    costs.came(2, brought, 0.0)
    costs.came(0, brought, 0.0)
    assert costs.joint(first, 0.0)[0] == pytest.approx(10.0)
    costs.came(2, later, 1.0)
    costs.came(1, brought, 5.0)
    assert costs.joint(second, 5.0)[1] == pytest.approx(5.0 + 1.0)


def test_nothing_of_workers_on_the_first_host_travels() -> None:
    one = cluster([Host(workers=4, bandwidth_bytes_per_s=1.0, latency_s=5.0)])
    assert set(meet(HostCosts(one, Compression()), average(range(4))).values()) == {0.0}
    assert HostCosts(one, Compression()).exchange(3, SIZE, SIZE, 0.0) == 0.0
    assert simulate(BSP(), one, iterations=10).result().seconds == pytest.approx(10.0)


@given(HOSTS)
def test_with_a_store_all_weights_leave_over_its_hosts_link_and_all_gradients_come_over_it(
    count: int,
) -> None:
    ways = StoreWays(cluster(alike(count)))
    begins = ways.pull(range(count), 0.0, once=True)
    assert begins[0] == 0.0
    assert max(begins.values()) == pytest.approx((count - 1) * SIZE / RATE)
    arrivals = ways.push(range(count), 100.0)
    assert max(arrivals.values()) == pytest.approx(100.0 + (count - 1) * SIZE / RATE)


@given(HOSTS)
def test_a_store_on_all_hosts_shares_its_traffic_among_their_links(count: int) -> None:
    """Every host keeps its own piece, sends one to each of the others and receives one from each."""
    spread = msgspec.structs.replace(cluster(alike(count)), store_hosts=count)
    ways, passed_on = StoreWays(spread), (count - 1) / count * SIZE / RATE
    assert ways.pull(range(count), 0.0, once=False) == pytest.approx(dict.fromkeys(range(count), passed_on))
    assert ways.push(range(count), 9.0) == pytest.approx(dict.fromkeys(range(count), 9.0 + passed_on))


def test_a_store_lies_on_hosts_that_exist() -> None:
    for hosts, store_hosts in (((), 2), (alike(2), 3), (alike(2), 0)):
        with pytest.raises(ConfigError, match=rf"store_hosts.*{store_hosts}.*Use 1 to"):
            Cluster(workers=2, model_bytes=SIZE, host=tuple(hosts), store_hosts=store_hosts)


def test_workers_alike_come_to_use_a_shared_link_one_after_another() -> None:
    """Each of three takes 1 s there, 1 s of computing, 1 s back: once they are out of step the link is free
    when it is wanted. Beside the store an iteration is 1 s. In step for ever three would take 3 + 1 + 3 s."""
    result = simulate(ASP(), cluster(alike(4)), iterations=100, until_s=70.0).result()
    assert result.iterations == pytest.approx(70 + 3 * 70 / 3, abs=6)


def test_lockstep_over_a_slow_first_link_takes_what_a_testbed_takes() -> None:
    """`bench fidelity` measures 575 ms per iteration on four hosts with 150 ms of computing and 1 MB over 100
    Mbit/s: less than 656 ms with links shared evenly, more than 487 ms if vectors went in turn."""
    rate = 100e6 / 8 * 1448 / 1514
    hosts = (Host(bandwidth_bytes_per_s=rate), *alike(3))
    wide = tuple(msgspec.structs.replace(x, bandwidth_bytes_per_s=10 * rate) for x in hosts[1:])
    bed = msgspec.structs.replace(cluster([*hosts[:1], *wide]), compute=Fixed(0.15), model_bytes=1_007_424)
    for run in (
        simulate(BSP(), bed, iterations=50),
        simulate_peers(PEERS["allreduce"](), bed, iterations=50),
    ):
        assert run.result().seconds / 50 == pytest.approx(0.575, rel=0.1)


def test_weights_travel_once_per_host_in_lockstep_and_once_per_worker_otherwise() -> None:
    for once, takes in ((True, 1.0), (False, 3.0)):
        ways = StoreWays(cluster([Host(), Host(workers=3, bandwidth_bytes_per_s=RATE)]))
        assert max(ways.pull(range(4), 0.0, once=once).values()) == pytest.approx(takes * SIZE / RATE)


@pytest.mark.parametrize("fabric", ["star", "ring"])
def test_links_without_limit_leave_every_simulation_as_it_is_without_links(fabric: str) -> None:
    plain = Cluster(workers=4, compute=Fixed(1.0), model_bytes=SIZE, slow={2: 2.0})
    free = Cluster(
        workers=4, compute=Fixed(1.0), model_bytes=SIZE, slow={2: 2.0}, host=(Host(),) * 4, fabric=fabric
    )  # type: ignore[arg-type]
    for protocol in (BSP(), ASP()):
        ours, theirs = (simulate(protocol, each, iterations=20).result() for each in (free, plain))
        assert ours.seconds == theirs.seconds
    for name in ("allreduce", "osp", "dpsgd", "ad_psgd", "ds_sync"):
        ours, theirs = (simulate_peers(PEERS[name](), each, iterations=20).result() for each in (free, plain))
        assert ours.seconds == theirs.seconds


def two_racks() -> Cluster:
    """Two hosts in each; inside a rack links are a hundred times faster than its uplink."""
    hosts = [Host(bandwidth_bytes_per_s=100 * RATE, rack=rack) for rack in ("left", "left", "right", "right")]
    uplinks = {rack: Link(0.0, RATE) for rack in ("left", "right")}
    return cluster(hosts, racks=uplinks, fabric="ring")


def test_ds_sync_spares_the_uplink_of_two_racks_every_other_iteration() -> None:
    """All-reduce sends 1.5 vectors over it in each iteration, pairs across racks two in every second one."""
    seconds = {
        name: simulate_peers(PEERS[name](), two_racks(), iterations=20).result().seconds - 20.0
        for name in ("allreduce", "ds_sync")
    }
    assert seconds["allreduce"] == pytest.approx(20 * 1.5, rel=0.02)
    assert seconds["ds_sync"] == pytest.approx(10 * 2.0, rel=0.05)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workers = 3\n[[host]]\n[[host]]", "the hosts have 2 workers, and workers differs, got 3"),
        ("[[host]]\nworkers = 0", "a host has workers >= 1, got 0"),
        ('[[host]]\nrack = "x"', r"hosts stand in racks without an uplink, got \['x'\]"),
        ("[[host]]\n[racks.y]\nlatency_s = 1", r"racks without a host, got \['y'\]"),
        ("[[host]]\n[link]\nlatency_s = 1", "links of workers do not work together with hosts"),
        ("[[host]]\nbandwidth_bytes_per_s = 1e6", "the model's size is unknown"),
        ('fabric = "mesh"\n[[host]]', "fabric in the file has a wrong value"),
        ('workers = 2\nfabric = "ring"', "a fabric is for hosts"),
    ],
)
def test_a_wrong_network_is_named(text: str, said: str, tmp_path: object) -> None:
    path = tmp_path / "cluster.toml"  # type: ignore[operator]
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_cluster(path)


def test_hosts_name_their_workers_so_no_other_number_is_taken() -> None:
    with pytest.raises(ConfigError, match="hosts name their workers"):
        cluster(alike(2)).with_workers(3)
