"""All benchmarks by name, and how a run of them becomes records."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable

import msgspec

from paceline.bench.allreduce import allreduce
from paceline.bench.death import death
from paceline.bench.exchange import exchange
from paceline.bench.hiding import hiding
from paceline.bench.lone import lone
from paceline.bench.machine import copy_bandwidth, look_around
from paceline.bench.network import network
from paceline.bench.plan import Plan, Say
from paceline.bench.record import Record, Row, today
from paceline.bench.simulator import simulator
from paceline.bench.store import store
from paceline.bench.trace import trace
from paceline.errors import unknown


class Benchmark(msgspec.Struct, frozen=True):
    """A question and the measurement that answers it."""

    question: str
    measure: Callable[[Plan, Say], list[Row]]


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
        "torch.distributed.rpc, and a plain socket. In turns, started anew for each size.",
        network,
    ),
    "hiding": Benchmark(
        "Of the time that bytes travel on a throttled link, the share that could be hidden behind computing "
        "and was not. Two workers over gloo, compute emulated, against the same exchange waited for.",
        hiding,
    ),
    "death": Benchmark("From SIGKILL of a worker to the store's `worker_left` event.", death),
    "lone": Benchmark("Training with one worker under the engine against plain PyTorch.", lone),
    "trace": Benchmark("Time spent inside the trace's writer, of the time a run takes.", trace),
    "simulator": Benchmark("Seconds to simulate a large cluster, for every protocol.", simulator),
}


def chosen(names: Iterable[str]) -> list[str]:
    """The benchmarks asked for; all when none is named."""
    names = list(names) or list(BENCHMARKS)
    for name in names:
        if name not in BENCHMARKS:
            raise unknown("benchmark", name, BENCHMARKS)
    return names


def run(name: str, plan: Plan, say: Say) -> Record:
    """Measure one."""
    benchmark = BENCHMARKS[name]
    sizes = {f"{size:g} MB": copy_bandwidth(round(size * 1e6)) for size in plan.sizes_mb}
    machine = look_around(sizes)
    return Record(
        name=name,
        question=benchmark.question,
        date=today(),
        command=shlex.join(["paceline", *sys.argv[1:]]),
        seed=plan.seed,
        quick=plan.quick,
        machine=machine,
        rows=benchmark.measure(plan, say),
    )
