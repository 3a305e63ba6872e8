"""Four ways to cut the sequences of a space-time transformer: bytes against their formulas, and speed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import msgspec

from paceline.decoding import decode_json
from paceline.errors import RunError
from paceline.parallel.sequence.ways import WAYS, backward_bytes, forward_bytes
from paceline.testbed import HostSpec, Testbed, why_not
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow, Value
from paceline_bench.harness.stats import ratio_of_medians, spread
from paceline_bench.sequence_worker import SequenceTask, WaySeen

PATIENCE_S = 300.0
ITEM = 4
"""Bytes of a float."""
FASTEST = 1.0
"""Dynamic switching is to be no slower than any other."""
LINKS_MBIT = (1000, 100)
EVEN = (1, 32, 128, 64)
"""Batch, time, space, width: every number of workers divides the second and the third."""
HOSTS = "abcdefgh"
Start = Callable[[int, Sequence[str]], "subprocess.Popen[str]"]


def sequences(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """On loopback, then between hosts whose links have a known speed."""
    if plan.quick:
        return _loopback(SequenceTask(2, (1, 5, 6, 8), 2, 1, 1, 2, plan.seed), plan, say)
    even = SequenceTask(4, EVEN, 8, 2, 5, 3, plan.seed)
    rows = _loopback(even, plan, say)
    rows += _loopback(msgspec.structs.replace(even, shape=(1, 30, 126, 64)), plan, say)
    return rows + between_hosts(plan, say)


def between_hosts(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Links of every speed, two and four workers; nothing where there is no testbed."""
    reason = why_not()
    if reason is not None:
        say(f"no link of a known speed: {reason}")
        return []
    rows = []
    for mbit in LINKS_MBIT:
        for workers in (2, 4):
            task = SequenceTask(workers, EVEN, 8, 2, 5, 1, plan.seed)
            rows += _hosts(task, mbit, plan, say)
    return rows


def _loopback(task: SequenceTask, plan: BenchPlan, say: Say) -> list[BenchRow]:
    def start(rank: int, command: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, **_pipes("lo"))

    return _rows(task, "loopback", _measure(task, start), plan, say)


def _hosts(task: SequenceTask, mbit: int, plan: BenchPlan, say: Say) -> list[BenchRow]:
    hosts = HOSTS[: task.workers]
    with Testbed.up({name: HostSpec(link_mbit=mbit) for name in hosts}) as bed:

        def start(rank: int, command: Sequence[str]) -> subprocess.Popen[str]:
            return bed[hosts[rank]].popen(list(command), **_pipes("eth0"))

        return _rows(task, f"{mbit} Mbit/s", _measure(task, start), plan, say)


def _pipes(interface: str) -> dict[str, Any]:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": interface}
    return {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}


def _measure(task: SequenceTask, start: Start) -> list[dict[str, WaySeen]]:
    """What every worker saw."""
    words = msgspec.json.encode(task).decode()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        program = [sys.executable, "-m", "paceline_bench.sequence_worker"]
        started = []
        for rank in range(task.workers):
            started.append(start(rank, [*program, str(rank), f"{folder}/meeting", words]))
            stack.callback(_end, started[-1])
        said = [worker.communicate(timeout=PATIENCE_S) for worker in started]
        for rank, (worker, (_, error)) in enumerate(zip(started, said, strict=True)):
            if worker.returncode:
                raise RunError(f"worker {rank} of the benchmark failed: {error.strip()[-300:]}")
    return [decode_json(out, kind=dict[str, WaySeen]) for out, _ in said]


def _end(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.wait()
    for stream in (worker.stdout, worker.stderr):
        if stream is not None:
            stream.close()


def _rows(
    task: SequenceTask, link: str, seen: list[dict[str, WaySeen]], plan: BenchPlan, say: Say
) -> list[BenchRow]:
    for way in WAYS:
        for rank, each in enumerate(seen):
            check_bytes(way, task, rank, each[way])
    return [_row(way, task, link, seen[0], plan, say) for way in WAYS]


def check_bytes(way: str, task: SequenceTask, rank: int, seen: WaySeen) -> None:
    """A figure of something that sends other bytes than its formula says would be of something else."""
    forward = task.layers * forward_bytes(way, task.shape, task.workers, ITEM)
    backward = task.layers * backward_bytes(way, task.shape, task.workers, ITEM)
    if (seen.forward, seen.backward) != (forward, backward):
        raise RunError(
            f"{way} on worker {rank} sent {seen.forward} bytes forward and {seen.backward} backward, but its "
            f"formula says {forward} and {backward}. Nothing measured on it would mean anything."
        )


def _row(
    way: str, task: SequenceTask, link: str, seen: dict[str, WaySeen], plan: BenchPlan, say: Say
) -> BenchRow:
    ours, mine = seen[WAYS[0]], seen[way]
    value, interval = ratio_of_medians(mine.seconds, ours.seconds, plan.seed)
    took = spread(list(chain(*mine.seconds)))
    batch, time, space, _ = task.shape
    formula = task.layers * (
        forward_bytes(way, task.shape, task.workers, ITEM)
        + backward_bytes(way, task.shape, task.workers, ITEM)
    )
    case: dict[str, Value] = {
        "way": way,
        "workers": task.workers,
        "time x space": f"{time} x {space}",
        "link": link,
        "bytes": mine.forward + mine.backward,
        "formula": formula,
        "gradients": mine.gradients,
        "wire": mine.wire if link != "loopback" else "",
        "samples/s": round(batch / took.median, 2),
    }
    speed = f"{formula / 1e6:.3f} MB, {case['samples/s']} samples/s"
    say(f"sequence, {way} on {task.workers} over {link}: {speed}")
    against = way != WAYS[0]
    return BenchRow(
        case=case,
        measured={"paceline": spread(list(chain(*ours.seconds))), **({"other": took} if against else {})},
        figure="speedup" if against else "seconds",
        value=value if against else took.median,
        interval=interval if against else None,
        target=FASTEST if against and not plan.quick else None,
        remark="" if not against else "of dynamic switching over this way",
    )
