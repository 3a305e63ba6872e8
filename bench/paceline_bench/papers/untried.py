"""Claims that no recipe tries: by which other benchmark they are tried, or why not and what it would take."""

from __future__ import annotations

from collections.abc import Callable

from paceline_bench.harness.record import BenchRow
from paceline_bench.papers.recipe import Figure, Open, between, close, shown_only, up_to

BEDS = ("unequal", "equal", "slow_first")
HOSTS = (
    "four hosts of a testbed of one machine with one worker each, links of 1 Gbit/s (unequal: 100 Mbit/s to "
    "the last host, and a third that is half as fast; slow_first: 100 Mbit/s to the first), devices that "
    "take 150 ms for a batch, a model of 1 MB. Hosts, links and sizes are our choice"
)
FIDELITY = "`paceline bench fidelity`, on a testbed (root)"


def on_testbeds(title: str, best: Figure) -> tuple[Figure, ...]:
    """The best of all testbeds, which is judged, and each of them."""
    return (best, *(shown_only(f"{bed}: {title}") for bed in BEDS))


def speeds(title: str, ours: str, base: str) -> Callable[[list[BenchRow]], dict[str, float]]:
    """Samples per second over those of another protocol, as `bench fidelity` has measured them."""

    def values(rows: list[BenchRow]) -> dict[str, float]:
        seen = {
            (row.case["testbed"], row.case["protocol"]): float(row.case["measured samples/s"]) for row in rows
        }
        asked = [(bed, protocol) for bed in BEDS for protocol in (ours, base)]
        if not all(seen.get(each) for each in asked):
            return {}
        gains = {f"{bed}: {title}": seen[bed, ours] / seen[bed, base] for bed in BEDS}
        return {title: max(gains.values()), **gains}

    return values


def sooner_than_ddp(rows: list[BenchRow]) -> dict[str, float]:
    """To an accuracy of CIFAR-10, as `bench cluster` has measured it between unequal hosts."""
    hosts = [row for row in rows if row.case.get("hosts") == "unequal" and row.value is not None]
    rates = [row.case["lr"] for row in hosts if row.case["protocol"] == "sync_switch"]
    seen = {
        (row.case["protocol"], row.case["to"]): row.value
        for row in hosts
        if row.case["lr"] in rates and row.value is not None
    }
    figures = {
        f"to {share}: DDP / {title}": seen[protocol, share]
        for share in ("50 %", "42 %")
        for title, protocol in (("Sync-Switch", "sync_switch"), ("ASP", "asp"))
        if (protocol, share) in seen
    }
    return figures if len(figures) == 4 else {}


OSP_GAIN, AD_PSGD_GAIN = "samples/s: OSP / all-reduce", "samples/s: AD-PSGD / all-reduce"

UNTRIED = (
    Open(
        name="ps_ddp_fsdp_eval",
        paper="DDP, FSDP and parameter servers (Ovi, 2025/26)",
        claim="asynchronous: up to 28 % less time, 4 to 17 points lost; FSDP: a quarter to a sixth of the "
        "memory",
        source="abstract of the second version",
        reason="six findings, each in or out of its published range, in real processes with all strategies "
        "side by side, on small stand-ins for the models and emulated devices. The most time was saved on "
        "throttled links; accuracy is that after 80 steps, when stale gradients with momentum do most "
        "harm; small models have more activations than weights, so that sharding weights saves less "
        "memory. No gain is claimed for the modified server, so that finding has to hold in every cell",
        takes="`paceline bench strategies`, about 25 minutes with three seeds",
        benchmark="strategies",
    ),
    Open(
        name="osp_measured",
        paper="OSP (Chen et al., ICPP 2023)",
        claim="Up to 50 % more throughput than popular ways to synchronise, between hosts",
        source="abstract; 9 nodes",
        reason=f"real processes on {HOSTS}. Four fifths of the model may be put off. `osp` has what its "
        "formula promises where exchanging takes as long as computing",
        takes=FIDELITY,
        benchmark="fidelity",
        figures=on_testbeds(OSP_GAIN, up_to(OSP_GAIN, 1.5, "up to 1.50x", inputs="ours")),
        values=speeds(OSP_GAIN, "osp", "allreduce"),
    ),
    Open(
        name="ad_psgd_measured",
        paper="AD-PSGD (Lian et al., ICML 2018)",
        claim="Each epoch is 4 to 8 times as fast as with all-reduce on an uneven network, between hosts",
        source="abstract; up to 128 GPUs",
        reason=f"real processes on {HOSTS}. The published network had up to 128 GPUs, and was shared with "
        "others",
        takes=FIDELITY,
        benchmark="fidelity",
        figures=on_testbeds(AD_PSGD_GAIN, between(AD_PSGD_GAIN, 4, 8)),
        values=speeds(AD_PSGD_GAIN, "ad_psgd", "allreduce"),
    ),
    Open(
        name="sync_switch_measured",
        paper="Sync-Switch (Li et al., ICDCS 2021)",
        claim="1.66 times as fast as BSP at BSP's accuracy, where ASP alone is 1.86 times as fast",
        source="the authors' summary plots, set-up 2: ResNet-50, CIFAR-100, 8 workers",
        reason="time to accuracy of a small CNN on CIFAR-10, three seeds, real processes on four unequal "
        "hosts of a testbed, with corrected stale momentum. The baseline is DistributedDataParallel. ASP "
        "gains there about what it does in the published set-up 2, so that is the one to compare with; the "
        "switch comes after 4,096 samples. Set-up 1, with 5.13 times, needs a BSP that takes 6.6 times as "
        "long as ASP: a straggler like that was not tried between hosts",
        takes="`paceline bench cluster --scenes unequal`, on a testbed (root), with CIFAR-10",
        benchmark="cluster",
        figures=(
            close("to 50 %: DDP / Sync-Switch", 1.66),
            shown_only("to 50 %: DDP / ASP", "1.86x"),
            shown_only("to 42 %: DDP / Sync-Switch"),
            shown_only("to 42 %: DDP / ASP"),
        ),
        values=sooner_than_ddp,
    ),
    Open(
        name="osdp_large",
        paper="OSDP (Jiang et al., IJCAI 2023)",
        claim="2.78 times as fast as FSDP for 8 layers of OPT-30B's shape in 16 GB",
        source="the authors' repository, README",
        reason="the authors' profile of that model could not be had, and it does not fit this machine",
        takes="8 GPUs with 16 GB",
    ),
)
