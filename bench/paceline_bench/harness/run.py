"""All benchmarks by name, and how a run of them becomes records."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from paceline.errors import ConfigError, unknown
from paceline_bench.cluster.cluster import check as check_cluster
from paceline_bench.cluster.cluster import cluster, record_name
from paceline_bench.embedding import embedding
from paceline_bench.fidelity.fidelity import check as check_fidelity
from paceline_bench.fidelity.fidelity import fidelity
from paceline_bench.harness.machine import OthersWork, copy_bandwidth, look_around
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRecord, BenchRow, today
from paceline_bench.kept import lines_kept
from paceline_bench.layers.layers import layers
from paceline_bench.micro.allreduce import allreduce
from paceline_bench.micro.death import death
from paceline_bench.micro.exchange import exchange
from paceline_bench.micro.hiding import hiding
from paceline_bench.micro.lone import lone
from paceline_bench.micro.network import network
from paceline_bench.micro.simulator import simulator
from paceline_bench.micro.store import store
from paceline_bench.micro.trace import trace
from paceline_bench.papers.papers import check_recipes, papers, plots_of_papers
from paceline_bench.pipelines.pipelines import pipelines
from paceline_bench.plans.plans import plans
from paceline_bench.rivals.peers import check_peers, peers
from paceline_bench.rivals.plot import plots_of_peers
from paceline_bench.sequence import sequences
from paceline_bench.strategies.strategies import check as check_strategies
from paceline_bench.strategies.strategies import strategies
from paceline_bench.strategies.told.plots import plots as plot_strategies


class Benchmark(msgspec.Struct, frozen=True):
    """A question and the measurement that answers it."""

    question: str
    measure: Callable[[BenchPlan, Say], list[BenchRow]]
    check: Callable[[BenchPlan], None] = lambda plan: None
    """Refuses a plan that cannot be carried out, before anything is measured."""
    plots: Callable[[list[BenchRow]], dict[str, str]] = lambda rows: {}
    """Pictures of the rows, as SVG."""
    part: str = ""
    """Which cell of a case names the part of a record that a run replaces; empty: all of it."""
    name: Callable[[str, BenchPlan], str] = lambda name, plan: name
    """What the record is called, where a plan decides which question is answered."""


BENCHMARKS = {
    "exchange": Benchmark(
        "BSP, from *gradients ready* to *new weights readable* on all workers: Paceline's `optimizer.step()` "
        "through the owner of the store, against gloo's all-reduce (what DDP does) and the same optimizer's "
        "step. Both in turns, started together, the longest of the workers counts. The other side has its "
        "gradients in flat buckets already, pays nothing for the division, and uses the way to all-reduce "
        "and the optimizer implementation that were fastest just before.",
        exchange,
    ),
    "allreduce": Benchmark(
        "All-reduce without a store. *One exchange*: Paceline's `optimizer.step()` over shared memory "
        "against gloo's all-reduce of flat buckets and the same optimizer's step. *Whole steps*: forward, "
        "backward and step of a small model, ours over shared memory and over gloo against "
        "DistributedDataParallel over gloo, all in turns; how much longer ours takes.",
        allreduce,
    ),
    "store": Benchmark(
        "ASP, push of a gradient, optimizer step in the store, pull of the weights; all workers at once, "
        "until the last has its weights. Paceline's store against a server behind torch.distributed.rpc and "
        "a warm Ray actor, which both get and return one flat tensor that nobody has to copy.",
        store,
    ),
    "network": Benchmark(
        "A tensor there and another back between two processes, on loopback and on a link of known speed "
        "between two hosts of a testbed: Paceline's session against itself under TLS, gloo's send and recv, "
        "torch.distributed.rpc (as it comes, and held to TCP), and a plain socket. In turns, started anew "
        "for each size.",
        network,
    ),
    "hiding": Benchmark(
        "Of the time that bytes travel on a throttled link, the share that could be hidden behind computing "
        "and was not. Two workers over gloo, compute emulated, against the same exchange waited for.",
        hiding,
    ),
    "cluster": Benchmark(
        "Time to accuracy with one worker per host: every protocol against DistributedDataParallel over "
        "gloo on the same hosts, which are those of a testbed or, with --simulated, simulated exactly "
        "(real gradients, virtual time; DDP is then a ring all-reduce). Emulated devices take 150 ms for "
        "a batch. *unequal*: four hosts with links of 1 Gbit/s, but 100 Mbit/s to the last; the third "
        "takes 300 ms. *equal*: four alike. *stalls*: these, but every 6 s one stands still for 2 s, in "
        "turn, all but the first. *text*: a transformer with AdamW on unequal hosts. *decay*: unequal "
        "hosts, the same samples for all, with a rate that falls to 0; accuracy is that of the last "
        "weights on all test images. *workers-N*: so many, one of four half as fast, links without cost. "
        "The model has 1 MB; the store, where there is one, is on the first host. Same body, order of "
        "data, optimizer and rule of the learning rate, by samples; only what steps along stale gradients"
        " without a correction gets half the rate. The clock begins with the first iteration. Accuracy is"
        " measured every 2048 samples (text: 1024) on 1000 test images (128 windows of text), and is the "
        "mean of three in a row. *Waiting* is the share of all workers' time in which no device computed;"
        " the figure is DDP's median time to the target over the entry's. With *rates tried*, the first "
        "seed has chosen the rate.",
        cluster,
        check_cluster,
        name=record_name,
    ),
    "fidelity": Benchmark(
        "Samples/s of every protocol as simulated (exact simulation: the same script, virtual time) and as "
        "measured on the hosts of a testbed with one worker each: four hosts, devices that take 150 ms for a "
        "batch of 64, a model of 1 MB. *unequal*: links of 1 Gbit/s, but 100 Mbit/s to the last host; the "
        "third device takes 300 ms. *equal*: four alike. *slow_first*: 100 Mbit/s to the first host, which "
        "has the store and the place where peers meet, so everything crosses that link. Nothing is "
        "evaluated. Samples/s are every worker's own, from its third push to its last, added up. The "
        "figure is how far the simulated ones are from those measured.",
        fidelity,
        check_fidelity,
    ),
    "peers": Benchmark(
        "What a user would run instead of Paceline, each as its documentation has it, beside some of ours: "
        "the same body, model, data, order of data, batch, optimizer, rule of the learning rate, hosts, "
        "links and straggler. Four hosts of a testbed as in *cluster, unequal* (1 Gbit/s, but 100 Mbit/s to "
        "the last), devices of 60 ms a batch (the third: 120 ms); a perceptron of 1 MB on scikit-learn's "
        "digits, or with --data the CNN and devices of *cluster* on CIFAR-10. Everybody tries the same "
        "number of learning rates; without rates to try, who steps along stale gradients without a "
        "correction gets half the usual one, and a server that takes whole steps a quarter of that. *time*: "
        "to the accuracy, from the first iteration on; the figure is DDP's median over it. "
        "*slow link*: both ways, as its kernel counts, from the start of the processes to the end. Then the "
        "same sides do three epochs of the digits, and the worker of the second host gets SIGKILL when half "
        "of the samples are done: *others go on* and after how long (the longest gap between two steps of a "
        "worker, less the usual one; if nobody goes on, seconds until all have ended or were ended after 60 "
        "s without a step: *cut off*), the exit status on the first host, samples that the last weights have "
        "not seen, and samples computed in vain.",
        peers,
        check_peers,
        plots_of_peers,
    ),
    "pipeline": Benchmark(
        "Seconds per batch of four equal blocks on four workers with emulated devices, forward one unit of "
        "time (50 ms) and backward two: pipelines whose stages do not wait, against what theory allows, and "
        "against torch.distributed.pipelining's GPipe and 1F1B, whose blocks sleep as long. The median gap "
        "between two batches counts, once the pipeline is full. *Time to an accuracy*: batches that a small "
        "network needs, counted in one process where stages take turns, times the seconds per batch from "
        "above; the other side is back-propagation's batches times those of torch's fastest schedule. "
        "CIFAR-10 only with --data.",
        pipelines,
    ),
    "layers": Benchmark(
        "Row-split layers: an MLP under a budget of memory for each worker that the kernel enforces. One "
        "worker runs out of memory, four train. What a worker took for one step beside the cost model: "
        "weights, bytes sent and synchronisations have to be equal, or nothing is recorded. Seconds are of "
        "a step on this machine's cores, which all workers share: they show no speed-up.",
        layers,
    ),
    "plans": Benchmark(
        "Planners. *Search*: seconds until a plan is there. *Whole steps*, HAP: a small transformer on four "
        "emulated devices of unequal speed (operations take as long as their flops would; processes, tensors "
        "and collectives are real), against DistributedDataParallel with even batches on the same devices. "
        "*Whole steps*, OSDP: layers of many bytes on four workers whose loopback is throttled (an emulated "
        "link), with a memory limit half-way between all sharded and all replicated, against all sharded; "
        "FSDP2 on both sides, layer by layer. In turns, medians of steps.",
        plans,
    ),
    "sequence": Benchmark(
        "A training step of two space-time layers (attention over space, then over time) whose sequences are "
        "cut over the workers, in four ways with the same weights and samples: dynamic switching against "
        "Ulysses, ring attention and Megatron's sequence parallelism. Forward, backward, gradients averaged "
        "over the workers, weights stepped; all ways in turns in the same processes. *Bytes* are what one "
        "worker sends per step for activations, as counted; they have to equal the formula. On hosts of a "
        "testbed, *wire* is what its kernel counts in a step, weights' gradients and headers included.",
        sequences,
    ),
    "embedding": Benchmark(
        "Looking up in embedding tables, back-propagating a given gradient and updating the rows, on two "
        "workers with tables split over both: against TorchRec's DistributedModelParallel with FBGEMM's "
        "fused row-wise AdaGrad (eight tables, table-wise), and against a dense table of a million rows that "
        "DistributedDataParallel keeps in step (plain SGD on both sides). Ids are Zipf's. Sides in turns in "
        "the same processes, a step begun together; the slower worker counts.",
        embedding,
    ),
    "papers": Benchmark(
        "The headline claims of the papers, as near to their set-ups as one small machine allows: the "
        "published figure, ours (the median over seeds), and a verdict by a rule that stands in the recipe. "
        "What is computed (by a formula, by a planner or as simulated times, from inputs that were chosen) "
        "is by construction, and never reproduced. Claims about accuracy are tried by training: real "
        "gradients in virtual time, on the digits or, with --data, on CIFAR-10. Claims that nothing here can "
        "judge yet are listed with the reason.",
        papers,
        check_recipes,
        plots_of_papers,
        part="recipe",
    ),
    "strategies": Benchmark(
        "DDP, FSDP2 and parameter servers (Ovi, arXiv 2505.12832), with the best of ours beside them: "
        "samples per second, memory, accuracy and bytes in cells of model, workers, link and straggler. All "
        "strategies train the same samples in the same order from the same weights with the same global "
        "batch, in real processes whose number each of them has told; all tried equally many learning "
        "rates. Models are small stand-ins. *Emulated* devices take 160 ms for a global batch of 64, a "
        "worker its part, so that the cores of this machine do not decide; units of a model take equal "
        "parts of it. *real*: the cores compute. Native: gloo over loopback for DDP and FSDP2, shared "
        "memory for the others; throttled: hosts of a testbed with 100 Mbit/s each, the store beside the "
        "first worker. x2: the last worker's device takes twice as long; paused: its process stands still "
        "for 1.5 s. ps-async weighs a push 1/N, ps-async-sum 1; ps-async-mod is our reading (bound 2, a new "
        "start every 10 steps per worker). Accuracy is that of the last weights.",
        strategies,
        check_strategies,
        plot_strategies,
    ),
    "death": Benchmark("From SIGKILL of a worker to the store's `worker_left` event.", death),
    "lone": Benchmark("Training with one worker under the engine against plain PyTorch.", lone),
    "trace": Benchmark("Time spent inside the trace's writer, of the time a run takes.", trace),
    "simulator": Benchmark("Seconds to simulate a large cluster, for every protocol.", simulator),
}


def chosen(names: Iterable[str], plan: BenchPlan) -> list[str]:
    """The benchmarks asked for, checked; without a name all that need neither root nor data of one's own."""
    names = list(names) or [name for name in BENCHMARKS if _is_usual(name, plan)]
    if plan.record and len(names) != 1:
        raise ConfigError(f"--as names one record, and {len(names)} benchmarks would run. Name one.")
    if plan.simulated and names != ["cluster"]:
        raise ConfigError(f"--simulated is for cluster alone, got {', '.join(names)}. Use bench cluster.")
    for name in names:
        if name not in BENCHMARKS:
            raise unknown("benchmark", name, BENCHMARKS)
        BENCHMARKS[name].check(plan)
    return names


def _is_usual(name: str, plan: BenchPlan) -> bool:
    """Whether it is run without being named: some want root or much time."""
    return name not in ("fidelity", "peers", "strategies") and (name != "cluster" or plan.data is not None)


def apart(names: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """Benchmarks, and the recipes among the words that follow `papers`: `papers dssp osp store`."""
    words = list(names)
    if "papers" not in words:
        return words, ()
    at = words.index("papers") + 1
    recipes = tuple(word for word in words[at:] if word not in BENCHMARKS)
    return [*words[:at], *(word for word in words[at:] if word in BENCHMARKS)], recipes


def shown_command(words: Iterable[str]) -> str:
    """As it was typed, but that a path of this machine alone is told by its last part."""
    return shlex.join(["paceline", *(Path(word).name if word.startswith("/") else word for word in words)])


def run(name: str, plan: BenchPlan, say: Say) -> BenchRecord:
    """Measure one."""
    benchmark = BENCHMARKS[name]
    sizes = {f"{size:g} MB": copy_bandwidth(round(size * 1e6)) for size in plan.sizes_mb}
    machine, others = look_around(sizes), OthersWork()
    kept = 0 if plan.results is None else lines_kept(Path(plan.results))
    rows = benchmark.measure(plan, say)
    return BenchRecord(
        name=plan.record or benchmark.name(name, plan),
        question=benchmark.question,
        date=today(),
        command=shown_command(sys.argv[1:]),
        seed=plan.seed,
        quick=plan.quick,
        machine=machine,
        rows=rows,
        load_after=os.getloadavg()[0],
        others=others.share(),
        kept=kept,
        plots=benchmark.plots(rows),
        part=benchmark.part,
    )
