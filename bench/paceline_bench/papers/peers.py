"""Recipes for protocols without a middle: times and bytes, in simulation."""

from __future__ import annotations

from paceline.protocols import Peer
from paceline.protocols.peer.ad_psgd import ADPSGD
from paceline.protocols.peer.allreduce import AllReduce
from paceline.protocols.peer.diloco import DiLoCo
from paceline.protocols.peer.dpsgd import DPSGD
from paceline.protocols.peer.ds_sync import DSSync
from paceline.protocols.peer.osp import OSP
from paceline.sim import Cluster, Fixed, Host, Link, Lognormal, simulate_peers
from paceline.trace.events import AnyEvent, WorkerLeft
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.papers.paced import SIMULATED, over_seeds
from paceline_bench.papers.recipe import Recipe, Values, between, close, shown_only, up_to

MB = 1_000_000


def _seconds(protocol: Peer, cluster: Cluster, iterations: int, seed: int) -> float:
    return simulate_peers(protocol, cluster, iterations=iterations, seed=seed).result().seconds


def _osp(plan: BenchPlan) -> Values:
    """A ring of n sends 2 (n - 1) / n of the model: the link is chosen so that this takes as long as "
    "computing."""
    workers, size, compute_s = 8, 64 * MB, 1.0
    link = Link(0.0, 2 * (workers - 1) / workers * size / compute_s)
    cluster = Cluster(workers=workers, compute=Fixed(compute_s), model_bytes=size, link=link)
    ours = OSP(overlap=2 / 3, ramp="constant", small_bytes=0)
    return {"BSP / OSP": [_later_s(AllReduce(), cluster, plan) / _later_s(ours, cluster, plan)]}


def _later_s(protocol: Peer, cluster: Cluster, plan: BenchPlan) -> float:
    """Seconds of one iteration once tensors are ranked, which is after 50: of twice as many, less once."""
    few = 60 if plan.quick else 200
    once, twice = (_seconds(protocol, cluster, each, plan.seed) for each in (few, 2 * few))
    return (twice - once) / few


def _dpsgd(plan: BenchPlan) -> Values:
    """A ring of neighbours against a ring all-reduce, over latencies and bandwidths."""
    workers, each = (16, 2) if plan.quick else (112, 5)

    def gain(latency_s: float, mbit: float) -> float:
        link = Link(latency_s, mbit * 1e6 / 8)
        cluster = Cluster(workers=workers, compute=Fixed(0.1), model_bytes=MB, link=link)
        return _seconds(AllReduce(), cluster, each, 0) / _seconds(DPSGD(), cluster, each, 0)

    gains = {(ms, mbit): gain(ms / 1000, mbit) for ms in (0.1, 1, 5) for mbit in (1000, 100, 10)}
    return {
        "slow network, the best: all-reduce / D-PSGD": [max(gains.values())],
        "0.1 ms, 1 Gbit/s": [gains[0.1, 1000]],
        "0.1 ms, 10 Mbit/s": [gains[0.1, 10]],
        "5 ms, 1 Gbit/s": [gains[5, 1000]],
    }


def _ad_psgd(plan: BenchPlan) -> Values:
    link, each = Link(1e-3, 1.25e8), 20 if plan.quick else 200
    cluster = Cluster(
        workers=16, compute=Lognormal(0.1, 0.05), slow={15: 10.0}, model_bytes=10 * MB, link=link
    )

    def figures(seed: int) -> dict[str, float]:
        together = _seconds(AllReduce(), cluster, each, seed) / each
        return {"all-reduce / AD-PSGD, an epoch": together / _free_s(ADPSGD(), cluster, each, seed)}

    return over_seeds(plan, figures)


def _free_s(protocol: Peer, cluster: Cluster, each: int, seed: int) -> float:
    """Seconds for as many gradients as there are workers, whoever makes them: from when each was done."""
    ends: dict[int, float] = {}

    def note(event: AnyEvent) -> None:
        if isinstance(event, WorkerLeft):
            ends[event.worker] = event.t

    simulate_peers(protocol, cluster, iterations=each, seed=seed, trace=note)
    return cluster.workers / sum(each / end for end in ends.values())


def _diloco(plan: BenchPlan) -> Values:
    workers, each = (2, 500) if plan.quick else (8, 1000)
    cluster = Cluster(workers=workers, compute=Fixed(0.1), model_bytes=64 * MB)

    def sent(protocol: Peer) -> int:
        return sum(simulate_peers(protocol, cluster, iterations=each).exchanged_bytes.values())

    return {"bytes: all-reduce / DiLoCo": [sent(AllReduce()) / sent(DiLoCo())]}


def _ds_sync(plan: BenchPlan) -> Values:
    """Two racks of two hosts; ranks of a rack in a row, or every other one."""

    def gain(uplink_gbit: float, racks: str) -> float:
        hosts = tuple(Host(bandwidth_bytes_per_s=1.25e9, latency_s=5e-5, rack=rack) for rack in racks)
        uplink = Link(5e-5, uplink_gbit * 1.25e8)
        cluster = Cluster(
            workers=4,
            compute=Fixed(0.1),
            model_bytes=64 * MB,
            host=hosts,
            racks=dict.fromkeys(sorted(set(racks)), uplink),
            fabric="ring",
        )
        each = 4 if plan.quick else 40
        return _seconds(AllReduce(), cluster, each, 0) / _seconds(DSSync(), cluster, each, 0)

    uplinks = (10, 2, 1, 0.5)
    row = {uplink: gain(uplink, "aabb") for uplink in uplinks}
    return {
        "BSP / DS-Sync, the best uplink": [max(row.values())],
        "uplink of 10 Gbit/s": [row[10]],
        "uplink of 1 Gbit/s": [row[1]],
        "uplink of 1 Gbit/s, ranks by turns": [gain(1, "abab")],
    }


PEER_RECIPES = (
    Recipe(
        name="osp",
        paper="OSP (Chen et al., ICPP 2023)",
        claim="Up to 50 % more throughput than popular ways to synchronise.",
        source="abstract",
        setup="8 workers; synchronising the whole model takes as long as computing (T_s = T_c), two thirds "
        "of it put off, once tensors are ranked. Against all-reduce without overlap.",
        evidence="computed",
        how=SIMULATED,
        figures=(up_to("BSP / OSP", 1.5, "up to 1.50x", inputs="ours"),),
        run=_osp,
        explained="The gain is (T_c + T_s) / (max(T_c, f T_s) + (1 - f) T_s), and is largest where both "
        "take equally long, which is why they do here. What real hosts gain is `osp_measured`. The "
        "baseline overlaps nothing: DistributedDataParallel, which sends gradients while it still computes "
        "others, has part of this gain without stale parameters.",
    ),
    Recipe(
        name="dpsgd",
        paper="D-PSGD (Lian et al., NeurIPS 2017)",
        claim="Up to 10 times as fast as well-optimised centralised training on slow networks, up to 112 "
        "GPUs.",
        source="abstract",
        setup="112 workers in a ring, mixing beside computing; a model of 1 MB, 0.1 s of computing; "
        "latencies of 0.1, 1 and 5 ms, links of 1000, 100 and 10 Mbit/s. Against a ring all-reduce.",
        evidence="computed",
        how=SIMULATED,
        figures=(
            up_to("slow network, the best: all-reduce / D-PSGD", 10, inputs="ours"),
            shown_only("0.1 ms, 1 Gbit/s"),
            shown_only("0.1 ms, 10 Mbit/s"),
            shown_only("5 ms, 1 Gbit/s"),
        ),
        run=_dpsgd,
        explained="The latency that gives most was put in by us, and a longer one gives any figure: latency "
        "is what is won. A ring all-reduce of n workers waits for 2 (n - 1) messages, a "
        "neighbourhood for two, and these travel while it computes. On a slow link without latency both send "
        "about twice the model, so little is won there against this baseline; it would be against one server "
        "for all. A tree all-reduce would also have far fewer messages. Mixing slowly costs accuracy per "
        "step, which is not looked at.",
        about_s=10,
    ),
    Recipe(
        name="ad_psgd",
        paper="AD-PSGD (Lian et al., ICML 2018)",
        claim="Each epoch is 4 to 8 times as fast as with all-reduce on a shared, uneven network.",
        source="abstract",
        setup="16 workers, one 10 times slower; a model of 10 MB, links of 1 Gbit/s with 1 ms, 5 % jitter. "
        "Averaging beside computing; work goes to whoever is ready.",
        evidence="computed",
        how=SIMULATED,
        figures=(between("all-reduce / AD-PSGD, an epoch", 4, 8),),
        run=_ad_psgd,
        explained="All-reduce runs at the straggler's pace, AD-PSGD at everybody's own: the figure grows "
        "with how slow the straggler is made. What real hosts gain is `ad_psgd_measured`. It is less than "
        "that as far as an exchange of whole models takes longer than the computing that it goes on "
        "beside. With shares that follow speed (balance) all-reduce would win much of it back.",
        about_s=15,
    ),
    Recipe(
        name="diloco",
        paper="DiLoCo (Douillard et al., 2023)",
        claim="500 times less communication than fully synchronous training, with 8 workers.",
        source="abstract",
        setup="8 workers, 1000 iterations, one exchange per 500; bytes given to averages, against "
        "all-reduce.",
        evidence="computed",
        how="simulated: bytes only",
        figures=(close("bytes: all-reduce / DiLoCo", 500),),
        run=_diloco,
        explained="The figure is the period, and shows only that ours sends "
        "nothing in between. Equal quality is a claim of its own: see `diloco_quality`.",
        about_s=3,
    ),
    Recipe(
        name="ds_sync",
        paper="DS-Sync (Wang et al., 2022)",
        claim="Up to 94 % faster than existing ways to synchronise, by keeping traffic off shared uplinks.",
        source="abstract of the second version; its tables could not be read",
        setup="4 hosts with links of 10 Gbit/s in two racks, whose uplinks of 10, 2, 1 and 0.5 Gbit/s all "
        "transfers share; a model of 64 MB, 0.1 s of computing. Rows and columns of a grid by turns, "
        "against a ring all-reduce in the order of racks, which crosses an uplink once each way.",
        evidence="computed",
        how=SIMULATED,
        figures=(
            up_to("BSP / DS-Sync, the best uplink", 1.94, inputs="ours"),
            shown_only("uplink of 10 Gbit/s"),
            shown_only("uplink of 1 Gbit/s"),
            shown_only("uplink of 1 Gbit/s, ranks by turns"),
        ),
        run=_ds_sync,
        explained="A grid crosses the uplink in every other iteration only, but then with two groups at "
        "once. How much that saves depends on how badly the ring lies to the racks, and on the uplink: "
        "both are our choice. Accuracy is a recipe of its own: `ds_sync_accuracy`.",
        about_s=3,
    ),
)
