"""Recipes for planners, and for models that are cut: predictions, simulated pipelines, formulas."""

from __future__ import annotations

import torch

from paceline.parallel.pipeline.simulating import simulate_pipeline
from paceline.parallel.registry import make_pipeline
from paceline.parallel.sequence.ways import WAYS, backward_bytes, forward_bytes
from paceline.plan.hap.plan import plan_hap
from paceline.plan.hap.trace import trace
from paceline.plan.osdp.knapsack import solve
from paceline.plan.osdp.options import Option
from paceline.plan.profile import ClusterProfile, Device, TransferCost
from paceline.plan.profile.units import GIB
from paceline.protocols.grid import Grid
from paceline.sim import Cluster, Fixed
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.papers.paced import SIMULATED
from paceline_bench.papers.recipe import Recipe, Values, at_most, close, exact, level, shown_only, up_to
from paceline_bench.plans.model import Letters

WIDE = ((377, 271, 147, 116), (0.051672141, 0.054875135, 0.060699721, 0.069794059))
NARROW = ((169, 120, 80, 62), (0.022742944, 0.026182946, 0.028019806, 0.03295156))
"""The authors' profile of one layer: MB and seconds with nothing, attention, MLP and both sharded."""
LAYERS, LIMIT_MB = 48, 8192 - 800


def _osdp(plan: BenchPlan) -> Values:
    values: Values = {}
    for title, (memory, seconds) in (("hidden 1536", WIDE), ("hidden 1024", NARROW)):
        options = [Option(s, m, 0) for m, s in zip(memory, seconds, strict=True)]
        found = solve([options] * LAYERS, LIMIT_MB)
        assert found is not None, "all sharded fits"
        values[f"{title}: seconds"] = [found.seconds]
        values[f"{title}: all sharded / OSDP"] = [LAYERS * seconds[3] / found.seconds]
    return values


def _hap(plan: BenchPlan) -> Values:
    width, layers, batch = (16, 1, 16) if plan.quick else (64, 2, 64)
    model = Letters(width, layers, 4)
    graph = trace(model, (torch.zeros(batch, model.length, dtype=torch.long),)).graph
    fastest = 3 * sum(node.flops for node in graph.nodes) / 0.8  # 0.8 s for the whole batch
    made = plan_hap(graph, _devices(fastest, (1, 1, 2, 4)), "letters", batch)
    equal = plan_hap(graph, _devices(fastest, (4, 4, 4, 4)), "letters", batch)
    simple = made.alternatives
    return {
        "even data parallel / HAP": [simple["DDP, even"].seconds / made.predicted.seconds],
        "equal devices: even data parallel / HAP": [
            equal.alternatives["DDP, even"].seconds / equal.predicted.seconds
        ],
        "batches by speed / HAP": [
            simple["DDP, batches by speed (--balance)"].seconds / made.predicted.seconds
        ],
    }


def _devices(fastest: float, speeds: tuple[int, ...]) -> ClusterProfile:
    devices = tuple(
        Device(name="emulated", flops_per_s=fastest * speed / 4, memory_bytes=32 * GIB) for speed in speeds
    )
    return ClusterProfile(devices=devices, link=TransferCost(latency_s=2e-5, bytes_per_s=1.25e9))


def _layerwise(plan: BenchPlan) -> Values:
    few, equal = 50 if plan.quick else 500, Cluster(workers=4, compute=Fixed(0.3))
    slow, last = (Cluster(workers=4, compute=Fixed(0.3), slow={stage: 2.0}) for stage in (1, 3))
    own_s, again_s = 0.6, 0.8
    taken_s = batch_s("layerwise", slow, few)
    return {
        "equal: BP / layer-wise": [batch_s("bp", equal, few) / batch_s("layerwise", equal, few)],
        "one stage x2: layer-wise / its own time": [taken_s / own_s],
        "one stage x2: BP / layer-wise": [batch_s("bp", slow, few) / taken_s],
        "one stage x2: layer-wise / its own time with the second forward": [taken_s / again_s],
        "one stage x2: FDG, which keeps graphs / its own time": [batch_s("fdg", slow, few) / own_s],
        "last stage x2: layer-wise / its own time": [batch_s("layerwise", last, few) / own_s],
    }


def batch_s(name: str, cluster: Cluster, few: int) -> float:
    """Seconds of one more batch once the pipeline is full: of twice as many batches, less once."""
    pipelined, grid = make_pipeline(name), Grid({"stage": cluster.workers})
    took = [
        simulate_pipeline(name, pipelined, grid, cluster, iterations=each).result().seconds
        for each in (few, 2 * few)
    ]
    return (took[1] - took[0]) / few


def _sequence(plan: BenchPlan) -> Values:
    """Forward and backward of one layer; the paper's shapes."""
    worst: dict[str, float] = {}
    for workers in (2, 4, 8):
        for time, space in ((64, 4096), (128, 4096), (256, 4096), (128, 9216)):
            shape = (1, time, space, 1152)
            sent = {
                way: forward_bytes(way, shape, workers, 2) + backward_bytes(way, shape, workers, 2)
                for way in WAYS
            }
            for way in WAYS[1:]:
                worst[way] = max(worst.get(way, 0.0), sent["dynamic"] / sent[way])
    return {f"bytes: dynamic / {way}, the worst": [share] for way, share in worst.items()}


PLANNED_RECIPES = (
    Recipe(
        name="osdp",
        paper="OSDP (Jiang et al., IJCAI 2023)",
        claim="Sharding only what has to be is 1.22 times as fast as FSDP for GPT-2 with 48 layers in 8 GB.",
        source="the authors' repository: throughput in its README, and its profile of one layer",
        setup="The authors' own profile, 48 layers, 8192 - 800 MB, exact search. The optimum was recomputed "
        "by enumerating all counts of layers; against all layers sharded, batch by batch.",
        evidence="computed",
        how="planner's prediction",
        figures=(
            exact("hidden 1536: seconds", 2.901937),
            exact("hidden 1024: seconds", 1.135479),
            close("hidden 1536: all sharded / OSDP", 1.22),
            shown_only("hidden 1024: all sharded / OSDP"),
        ),
        run=_osdp,
        explained="Prediction against prediction: the ratio is that of the authors' own measured layers, "
        "so what is tried is our search, and not a run on 8 GPUs. Of the published gain, which was "
        "measured, the profile predicts two thirds. `bench plans` runs FSDP2 layer by layer with such a "
        "plan. The gain exists only between the two ends of the memory limit.",
    ),
    Recipe(
        name="hap",
        paper="HAP (Zhang et al., EuroSys 2024)",
        claim="Up to 2.41 times as fast as the baselines on unequal devices, on a par on equal ones.",
        source="abstract",
        setup="A transformer of 2 layers, 4 devices of speeds 1, 1, 2, 4, links of 10 Gbit/s; 0.8 s for the "
        "whole batch on the fastest. Against even data parallel, by the same cost model.",
        evidence="computed",
        how="planner's prediction",
        figures=(
            up_to("even data parallel / HAP", 2.41, inputs="ours"),
            level("equal devices: even data parallel / HAP"),
            shown_only("batches by speed / HAP"),
        ),
        run=_hap,
        explained="With these speeds no more than 2 can be won from the computing itself: the even share of "
        "the slowest over its fair one. The models and links with which 2.41 was reached could not be read. "
        "Data parallel with batches by speed, a baseline that is easy to have, is as good here.",
        about_s=10,
    ),
    Recipe(
        name="layerwise",
        paper="Layer-wise staleness (Xu et al., CVPR 2020)",
        claim="A batch takes as long as the slowest block, not as long as all of them, and a slow device "
        "costs no more than its own time.",
        source="PETRA's Table 1 for this class: 3J per batch for back-propagation, 3 with delays (J stages)",
        setup="4 stages of equal cost, a third forward and two thirds backward, no jitter, messages without "
        "cost; then one stage twice as slow. Seconds per batch once the pipeline is full.",
        evidence="computed",
        how=SIMULATED,
        figures=(
            close("equal: BP / layer-wise", 4.0),
            level("one stage x2: layer-wise / its own time"),
            shown_only("one stage x2: BP / layer-wise"),
            shown_only("one stage x2: layer-wise / its own time with the second forward"),
            shown_only("one stage x2: FDG, which keeps graphs / its own time"),
            shown_only("last stage x2: layer-wise / its own time"),
        ),
        run=_layerwise,
        explained="A stage that keeps inputs only forwards a batch again before its backward. Own time is a "
        "forward and a backward, so with the second forward 4/3 of it is due, and neither figure can be met; "
        "against back-propagation 3 of the 4 times are left. That is the method and no waiting: the slow "
        "stage is never idle, a pipeline that keeps graphs (FDG) takes exactly its own time, and so does a "
        "slow last stage, which need not forward again. The published table counts 4 in flops and 3 in time: "
        "it takes the second forward to run beside the first, of another batch. That is a gain on a device "
        "which one of them does not fill, and none on one that does one thing at a time, as simulated here "
        "and in the engine. The last three figures were added after a first result and are not judged. GPipe "
        "and 1F1B, which are exact, have most of the gain with enough micro-batches: `bench pipeline`.",
        about_s=3,
    ),
    Recipe(
        name="dsp_bytes",
        paper="Dynamic sequence parallelism (Zhao et al., 2024)",
        claim="At most half the bytes of the methods that are embedded in the layers.",
        source="the paper's claim in its last version; an earlier one has a quarter",
        setup="The published sizes (2, 4, 8 workers; 64 x 4096 to 128 x 9216 tokens), width 1152, bytes of "
        "forward and backward of one layer. `bench sequence` checks that these formulas are what is sent.",
        evidence="computed",
        how="formula",
        figures=tuple(at_most(f"bytes: dynamic / {way}, the worst", 0.5, "at most half") for way in WAYS[1:]),
        run=_sequence,
        explained="Two all-to-alls of the activations replace four (Ulysses); ring and Megatron's gather "
        "grow with the number of workers besides. Throughput is a claim of its own: see `dsp_throughput`.",
    ),
)
