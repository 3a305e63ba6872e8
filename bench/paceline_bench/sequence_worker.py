"""One worker of the benchmark of sequence parallelism: trains the same layers in four ways, in turns.

`python -m paceline_bench.sequence_worker RANK MEETING TASK`; the task is JSON. Every worker prints, as JSON,
what each way took and sent.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.decoding import decode_json
from paceline.parallel.sequence import Line, mean, split
from paceline.parallel.sequence.gradients import average_gradients
from paceline.parallel.sequence.megatron import MegatronBlock
from paceline.parallel.sequence.spacetime import TIME, SpaceTimeLayer
from paceline.parallel.sequence.ways import WAYS, Computed, made


class SequenceTask(msgspec.Struct, frozen=True):
    """What is trained, and how often."""

    workers: int
    shape: tuple[int, int, int, int]
    """Batch, time, space, width."""
    heads: int
    layers: int
    blocks: int
    rounds: int
    seed: int = 0


class WaySeen(msgspec.Struct):
    """What one way took and sent, on one worker."""

    seconds: list[list[float]]
    """Of every step, block by block."""
    forward: int = 0
    backward: int = 0
    gradients: int = 0
    """Bytes of one step, as counted: activations, their gradients, and those of the weights."""
    wire: int = 0
    """What the kernel says has left through the interface in the same step, headers included."""


class WayTrainer:
    """One way: its weights, and a step."""

    def __init__(self, way: str, task: SequenceTask, rank: int, x: Tensor) -> None:
        torch.manual_seed(task.seed)
        self.line = Line(rank, task.workers, dist.group.WORLD)
        made_layers = [
            made(way, SpaceTimeLayer(task.shape[-1], task.heads), self.line) for _ in range(task.layers)
        ]
        self._layers: list[Computed] = [compute for compute, _ in made_layers]
        whole = nn.ModuleList(module for _, module in made_layers)
        self._parameters = list(whole.parameters())
        self._alone = [p for b in whole.modules() if isinstance(b, MegatronBlock) for p in b.own()]
        self._optimizer = torch.optim.SGD(self._parameters, lr=1e-3)
        self._x = x
        self.seen = WaySeen([])

    def step(self) -> None:
        """Forward, backward, gradients averaged, weights stepped."""
        z = split(self._x, TIME, self.line)
        before = self.line.bytes.total()
        for compute in self._layers:
            z = compute(z)
        self.seen.forward = self.line.bytes.total() - before
        loss = mean(z.map(torch.square))
        before = self.line.bytes.total()
        loss.backward()  # type: ignore[no-untyped-call]
        self.seen.backward = self.line.bytes.total() - before
        before = self.line.bytes.total()
        average_gradients(self._parameters, self.line, self._alone)
        self.seen.gradients = self.line.bytes.total() - before
        self._optimizer.step()
        self._optimizer.zero_grad()

    def block(self, rounds: int, sent: Callable[[], int]) -> None:
        """Steps that are timed, begun together."""
        times = []
        for _ in range(rounds):
            dist.barrier()
            began, before = time.perf_counter(), sent()
            self.step()
            times.append(time.perf_counter() - began)
            self.seen.wire = sent() - before
        self.seen.seconds.append(times)


def sent_through(name: str) -> int:
    """Bytes that have left through an interface, by the kernel's count."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith(f"{name}:"))
    return int(line.partition(":")[2].split()[8])


def main() -> None:
    """Train in all ways, in turns."""
    rank, meeting = int(sys.argv[1]), sys.argv[2]
    task = decode_json(sys.argv[3], kind=SequenceTask)
    torch.set_num_threads(1)
    link = os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=task.workers)
    x = torch.randn(*task.shape, generator=torch.Generator().manual_seed(task.seed))
    trainers = {way: WayTrainer(way, task, rank, x) for way in WAYS}
    for trainer in trainers.values():
        trainer.step()  # the first one warms up
    for _ in range(task.blocks):
        for trainer in trainers.values():
            trainer.block(task.rounds, lambda: sent_through(link))
    dist.barrier()
    print(msgspec.json.encode({way: trainer.seen for way, trainer in trainers.items()}).decode(), flush=True)
    dist.destroy_process_group()  # else its threads may still run when the interpreter ends, which aborts


if __name__ == "__main__":
    main()
