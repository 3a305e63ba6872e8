"""The other side of the benchmarks on a small cluster: the same body under somebody else's means.

One process per host, started as torchrun would (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`). A pace
has the few methods that the body calls. The device is emulated by the same code as in Paceline: when a
gradient is complete the worker sleeps for what its device would still need, and only then sends.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from paceline.config import RunConfig
from paceline.runtime.worker.emulation import Emulation
from paceline.store.ledger import run_started
from paceline.trace import TraceWriter
from paceline.trace.events import Decided, Evaluated
from paceline_bench.cluster.script import options, train

NAME = "ddp"
STEPS = "steps"
EPOCHS = "epochs"


class OtherPace:
    """What the body calls; every rank writes a trace of its own."""

    def __init__(self, name: str, config: RunConfig, snapshots: Path | None, rank: int, size: int) -> None:
        """`snapshots`: where the state is kept after every epoch, and is found after a restart."""
        if size != config.workers:
            raise SystemExit(f"a world of {config.workers} was asked for, and {size} came")
        self.rank, self.size, self.seed = rank, size, config.seed
        self.emulation = Emulation(config, rank)
        self.module: nn.Module = nn.Module()
        self.optimizer: Any = None
        self.scheduler: Any = None
        self._snapshots = snapshots
        self._batch = 0
        self.steps, self.samples = 0, 0
        # not torchrun's count of restarts: an agent whose worker was well starts it anew without counting
        traces = (trace_of(config.path, rank, attempt) for attempt in itertools.count())
        self._trace = TraceWriter(next(path for path in traces if not path.exists()))
        self._trace.write(run_started(config, name, {}, False))

    def deal(self, loader: DataLoader[Any]) -> Timed:
        """Every epoch's order, dealt out in turn."""
        self._dealt: DistributedSampler[Any] = DistributedSampler(
            loader.dataset, self.size, self.rank, seed=self.seed, drop_last=True
        )
        self._batch = loader.batch_size or 1
        again = DataLoader(loader.dataset, batch_size=self._batch, sampler=self._dealt, drop_last=True)
        return Timed(again, self.emulation.begin)

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], scheduler: Any) -> Any:
        """Wrap what the body has made, as this rival wants it."""
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        """As everybody does, unless a rival has its own way."""
        loss.backward()  # type: ignore[no-untyped-call]

    def epochs(self, count: int) -> Iterator[int]:
        """Every epoch has an order of its own."""
        for epoch in range(self._restored(), count):
            self._dealt.set_epoch(epoch)
            yield epoch
            self._keep(epoch + 1)

    def evaluate(self, fn: Callable[[nn.Module], dict[str, float]]) -> None:
        """Rank 0, while the others go on, or wait for it at the next exchange."""
        if self.rank != 0:
            return
        t, began = time.monotonic(), time.perf_counter()
        with torch.no_grad():
            values = fn(self.module)
        seconds = time.perf_counter() - began
        self._write(Evaluated(t, 0, self.steps, self.samples, values, seconds))

    def computed(self) -> None:
        """The gradient is complete: wait for the device, and write the step down."""
        compute_s = self.emulation.finish()
        self.steps += 1
        self.samples += self._batch * self.size
        now = time.monotonic()
        self._write(
            Decided(
                now,
                self.steps,
                self.rank,
                self.steps,
                clock=self.steps,
                samples=self._batch,
                compute_s=compute_s,
            )
        )

    def close(self) -> None:
        """All work is done."""
        self._trace.close()

    def state(self) -> dict[str, Tensor]:
        """Weights and what the optimizer remembers; all ranks are asked at the same time."""
        found = {f"model.{name}": value.clone() for name, value in self.module.state_dict().items()}
        for number, held in self.optimizer.state_dict()["state"].items():
            found |= {
                f"state.{number}.{key}": value.clone() for key, value in held.items() if _is_tensor(value)
            }
        return found

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The other way round."""
        self.module.load_state_dict(_below("model.", state))
        held: dict[int, dict[str, Tensor]] = {}
        for name, value in _below("state.", state).items():
            number, _, key = name.partition(".")
            held.setdefault(int(number), {})[key] = value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": held})

    def _keep(self, epochs: int) -> None:
        if self._snapshots is None:
            return
        state = self.state() | {STEPS: torch.tensor(self.steps), EPOCHS: torch.tensor(epochs)}
        if self.rank == 0:
            unfinished = self._snapshots.with_suffix(".unfinished")
            save_file({name: value.contiguous() for name, value in state.items()}, unfinished)
            unfinished.rename(self._snapshots)

    def _restored(self) -> int:
        """Epochs that a snapshot has behind it; 0 without one."""
        if self._snapshots is None or not self._snapshots.exists():
            return 0
        state = load_file(self._snapshots)
        self.load_state(state)
        self.steps = int(state[STEPS])
        self.samples = self.steps * self._batch * self.size
        self.go_on()
        return int(state[EPOCHS])

    def go_on(self) -> None:
        """Put the learning rate where the steps are."""
        scheduler = self.scheduler
        scheduler.last_epoch = self.steps
        for group, base, rule in zip(
            scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * rule(self.steps)

    def _write(self, event: Decided | Evaluated) -> None:
        self._trace.write(event)
        self._trace.flush()


class Timed:
    """A loader that tells when a batch has come."""

    def __init__(self, loader: DataLoader[Any], arrived: Callable[[], None]) -> None:
        self.silent, self._arrived = loader, arrived

    def __iter__(self) -> Iterator[Any]:
        for batch in self.silent:
            self._arrived()
            yield batch


def trace_of(folder: Path, rank: int, attempt: int = 0) -> Path:
    """Where a rank's trace is; it has one for every time it was started."""
    return folder / (f"rank{rank}.{attempt}.jsonl" if attempt else f"rank{rank}.jsonl")


def run(pace: Callable[[RunConfig, Path | None, argparse.Namespace], OtherPace], name: str) -> None:
    """What the emulation needs to know comes first, then the words of the body."""
    mine, words = parser().parse_known_args()
    told = options(words)
    made = pace(config_of(mine, told.seed, name), mine.snapshots, told)
    train(made, told)
    made.close()


def parser() -> argparse.ArgumentParser:
    """What is said to the other side, and not to its body."""
    made = argparse.ArgumentParser()
    made.add_argument("--folder", required=True)
    made.add_argument("--device-time", type=float, required=True)
    made.add_argument("--slow", action="append", default=[], metavar="RANK:FACTOR")
    made.add_argument("--snapshots", type=Path)
    return made


def config_of(mine: argparse.Namespace, seed: int, name: str) -> RunConfig:
    """Hosts and devices, as the rest of Paceline describes them."""
    return RunConfig(
        run=name,
        folder=mine.folder,
        workers=int(os.environ["PEERS"]),
        seed=seed,
        slow={int(rank): float(factor) for rank, _, factor in (each.partition(":") for each in mine.slow)},
        device_time_s=mine.device_time,
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
