"""The other side of the benchmark of a small cluster: DistributedDataParallel over gloo, and the same body.

One process per host, started as torchrun would (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`).
Its pace has the few methods that the body calls. The device is emulated by the same code as in
Paceline: when a gradient is complete the worker sleeps for what its device would still need, and
then all-reduces. The model fits into DDP's first bucket, so that DDP has nothing to send before.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from paceline.bench.cluster.script import options, train
from paceline.config import RunConfig
from paceline.runtime.worker.emulation import Emulation
from paceline.store.ledger import run_started
from paceline.trace import TraceWriter
from paceline.trace.events import Decided, Evaluated

NAME = "ddp"


class DDPPace:
    """What the body calls, with torch's own means; every rank writes a trace of its own."""

    def __init__(self, config: RunConfig) -> None:
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size != config.workers:
            raise SystemExit(f"a world of {config.workers} was asked for, and {self.size} came")
        self._seed, self._steps, self._samples, self._batch = config.seed, 0, 0, 0
        self._emulation = Emulation(config, self.rank)
        self._trace = TraceWriter(trace_of(config.path, self.rank))
        self._trace.write(run_started(config, NAME, {}, False))

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], scheduler: Any) -> Any:
        """Wrap the model, and deal every epoch's order out in turn."""
        self._module = model
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # not the method itself: DDP compares annotations, and ours are strings
        wrapped.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))
        dealt: DistributedSampler[Any] = DistributedSampler(
            loader.dataset, self.size, self.rank, seed=self._seed, drop_last=True
        )
        self._batch = loader.batch_size or 1
        again = DataLoader(loader.dataset, batch_size=self._batch, sampler=dealt, drop_last=True)
        self._loader = Timed(again, self._emulation.begin)
        self._dealt = dealt
        return wrapped, optimizer, self._loader, scheduler

    def epochs(self, count: int) -> Iterator[int]:
        """Every epoch has an order of its own."""
        for epoch in range(count):
            self._dealt.set_epoch(epoch)
            yield epoch

    def evaluate(self, fn: Callable[[nn.Module], dict[str, float]]) -> None:
        """Rank 0, while the others wait for it at the next all-reduce."""
        if self.rank != 0:
            return
        t, began = time.monotonic(), time.perf_counter()
        with torch.no_grad():
            values = fn(self._module)
        seconds = time.perf_counter() - began
        self._write(Evaluated(t, 0, self._steps, self._samples, values, seconds))

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The gradient is complete: wait for the device, then for the others."""
        compute_s = self._emulation.finish()
        if bucket.is_last():
            self._steps += 1
            self._samples += self._batch * self.size
            step = Decided(
                time.monotonic(),
                self._steps,
                self.rank,
                self._steps,
                samples=self._batch,
                compute_s=compute_s,
            )
            self._write(step)
        assert dist.group.WORLD is not None
        return allreduce_hook(dist.group.WORLD, bucket)

    def _write(self, event: Decided | Evaluated) -> None:
        self._trace.write(event)
        self._trace.flush()


class Timed:
    """A loader that tells when a batch has come."""

    def __init__(self, loader: DataLoader[Any], arrived: Callable[[], None]) -> None:
        self._loader, self._arrived = loader, arrived

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._arrived()
            yield batch


def trace_of(folder: Path, rank: int) -> Path:
    """Where a rank's trace is."""
    return folder / f"rank{rank}.jsonl"


def main() -> None:
    """What the emulation needs to know comes first, then the words of the body."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--device-time", type=float, required=True)
    parser.add_argument("--slow", action="append", default=[], metavar="RANK:FACTOR")
    mine, words = parser.parse_known_args()
    told = options(words)
    config = RunConfig(
        run=NAME,
        folder=mine.folder,
        workers=int(os.environ["WORLD_SIZE"]),
        seed=told.seed,
        slow={int(rank): float(factor) for rank, _, factor in (each.partition(":") for each in mine.slow)},
        device_time_s=mine.device_time,
    )
    train(DDPPace(config), told)


if __name__ == "__main__":
    main()
