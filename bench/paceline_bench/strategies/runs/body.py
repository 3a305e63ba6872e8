"""The body of the benchmark of strategies: one ordinary loop, whatever keeps the workers in step.

All strategies get the same samples in the same order, cut into global batches alike, and the same initial
weights.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.config import RunConfig
from paceline.parallel.plans.hap.emulated_device import EmulatedDevice
from paceline.parallel.plans.meter import Meter
from paceline_bench.strategies.runs.models import make, parameter_bytes, put_on
from paceline_bench.strategies.runs.request import Answer, Pause, StrategyRequest, write_answer
from paceline_bench.strategies.server import server_peak, shared_bytes

MOMENTUM = 0.9
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class StrategySide(Protocol):
    """What keeps the workers of a strategy in step."""

    rank: int
    size: int

    def place(self, model: nn.Module) -> nn.Module:
        """Before there is an optimizer."""

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> Any:
        """Model, optimizer and loader to train with."""

    def finish(self, folder: Path) -> None:
        """All batches are done: leave, with the weights in the folder."""


def train(side: StrategySide, request: StrategyRequest) -> None:
    """The whole run of one worker."""
    torch.set_num_threads(1)
    _free_at_once()
    data = load_file(request.data)
    shape = shape_of(data["x"])
    _touch_libraries(request.model, shape, request.batch)
    model = make(request.model, shape, request.width, request.seed)
    device = _device(request, side.rank)
    if request.device_s is not None:
        put_on(model, device, request.of)
    meter = Meter(parameter_bytes(model))
    placed = side.place(model)
    optimizer = torch.optim.SGD(placed.parameters(), lr=request.lr, momentum=MOMENTUM)
    dataset = TensorDataset(data["x"], data["y"])
    loader = DataLoader(dataset, batch_size=request.batch, shuffle=False, drop_last=True)
    ready = side.prepare(placed, optimizer, loader)
    meter.begin()
    seen = TrainingLoop(_Pauses(request.pause, side.rank))
    seen.iterate(*ready)
    answer = Answer(
        rank=side.rank,
        world=side.size,
        began=seen.began,
        ends=seen.ends,
        samples=seen.samples,
        losses=seen.losses,
        held_bytes=seen.held_bytes,
        peak_bytes=meter.peak_bytes,
        late=device.overruns / max(1, device.waits),
        shared_bytes=shared_bytes(),
        server_bytes=server_peak(Path(request.folder)) if side.rank == 0 else None,
    )
    side.finish(Path(request.folder))
    write_answer(Path(request.folder), answer)


class TrainingLoop:
    """The loop, and what one worker sees of it."""

    def __init__(self, pauses: _Pauses) -> None:
        self._pauses = pauses
        self.began, self.held_bytes = 0.0, 0
        self.ends: list[float] = []
        self.samples: list[int] = []
        self.losses: list[float | None] = []

    def iterate(self, model: nn.Module, optimizer: Any, loader: Any) -> None:
        """All batches that this worker gets."""
        for x, y in loader:
            self._pauses.look(len(self.ends))
            self.began = self.began or time.monotonic()
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if len(self.ends) == 1:
                self.held_bytes = held_bytes(model, optimizer)
            optimizer.zero_grad()
            self.ends.append(time.monotonic())
            self.samples.append(len(x))
            self.losses.append(loss.item())


def shape_of(x: Tensor) -> tuple[int, int, int]:
    """Channels and pixels of images."""
    channels, height, width = x.shape[1:]
    return channels, height, width


def _touch_libraries(name: str, shape: tuple[int, int, int], batch: int) -> None:
    """Train a narrow one for a step: what libraries load for it is not the model's memory, nor its time."""
    narrow = make(name, shape, 8, 0)
    narrow(torch.zeros(batch, *shape)).sum().backward()
    torch.optim.SGD(narrow.parameters(), lr=0.0, momentum=MOMENTUM).step()


def held_bytes(model: nn.Module, optimizer: Any) -> int:
    """Parameters, gradients and state of an optimizer that lie in this process."""
    values = list(model.parameters())
    tensors = [*values, *(value.grad for value in values if value.grad is not None)]
    states = optimizer.state.values()
    tensors += [part for state in states for part in state.values() if isinstance(part, Tensor)]
    return sum(_local(tensor).numel() * tensor.element_size() for tensor in tensors)


def _local(tensor: Tensor) -> Tensor:
    """What a rank has of a sharded tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _device(request: StrategyRequest, rank: int) -> EmulatedDevice:
    config = RunConfig(
        run="bench",
        folder="",
        workers=request.workers,
        seed=request.seed,
        slow=request.slow,
        device_time_s=request.device_s,
    )
    return EmulatedDevice(config, rank, 1.0)


class _Pauses:
    """Stops this process for a while, all its threads, when the time has come."""

    def __init__(self, pause: Pause | None, rank: int) -> None:
        self._pause = pause if pause is not None and pause.rank == rank else None

    def look(self, iterations: int) -> None:
        """So many iterations are over."""
        if self._pause is None or iterations < self._pause.after:
            return
        own, seconds, self._pause = os.getpid(), self._pause.seconds, None
        with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {own}"]):
            os.kill(own, signal.SIGSTOP)


def _free_at_once() -> None:
    """Freed memory goes back to the system, so that the memory of a process is that of its tensors."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 65536)
    libc.mallopt(M_TRIM_THRESHOLD, 131072)
