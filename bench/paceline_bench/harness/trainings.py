"""Whole training steps, ours and DistributedDataParallel's: the same small model, data and optimizer."""

from __future__ import annotations

import os
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.fabric.channel import Channel
from paceline_bench.harness.crew import BenchCrew
from paceline_bench.harness.stations import ExchangeLoad, paceline_crew
from paceline_bench.wrapped.ddp import wrapped

CLASSES = 10


class TrainingTask(msgspec.Struct, frozen=True):
    """What is trained, and for how many steps per round."""

    model: str
    """`cnn` or `transformer`."""
    width: int
    batch: int
    steps: int


class Transformer(nn.Module):
    """Two layers over a short text."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Classes of texts."""
        logits: Tensor = self.head(self.body(self.embed(tokens)).mean(1))
        return logits


def cnn(width: int) -> nn.Module:
    """Three convolutions and a wide layer."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2 * width, 4 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, CLASSES)),
    )


class Training:
    """Steps on one batch, again and again."""

    def __init__(self, task: TrainingTask, load: ExchangeLoad) -> None:
        torch.set_num_threads(load.threads)
        torch.manual_seed(load.seed)
        self._steps = task.steps
        self.model = Transformer(task.width) if task.model == "transformer" else cnn(task.width)
        shape = (task.batch, 32) if task.model == "transformer" else (task.batch, 3, 32, 32)
        self._x = torch.randint(1000, shape) if task.model == "transformer" else torch.randn(shape)
        self._y = torch.randint(CLASSES, (task.batch,))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def train(self) -> None:
        """A round."""
        for _ in range(self._steps):
            F.cross_entropy(self.model(self._x), self._y).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()


class OurTraining:
    """An ordinary loop, prepared."""

    def __init__(
        self, task: TrainingTask, load: ExchangeLoad, config: RunConfig, rank: int, sock: socket.socket
    ) -> None:
        import paceline
        from paceline.runtime import seat

        seat.take(seat.Seat(rank, config, Channel(sock)))
        self._pace = paceline.join()
        self._training = Training(task, load)
        self._pace.prepare(self._training.model, self._training.optimizer)
        self.world = self._pace.size

    def prepare(self) -> None:
        """All that is done is timed."""

    def exchange(self) -> None:
        """Train."""
        self._training.train()

    def close(self) -> None:
        """Leave the run."""
        self._pace.depart()


class DDPTraining:
    """The same loop with the model wrapped."""

    def __init__(self, task: TrainingTask, load: ExchangeLoad, rank: int, meeting: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=load.workers)
        self.world = dist.get_world_size()
        self._training = Training(task, load)
        self._training.model = wrapped(self._training.model)

    def prepare(self) -> None:
        """All that is done is timed."""

    def exchange(self) -> None:
        """Train."""
        self._training.train()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def our_crew(task: TrainingTask, load: ExchangeLoad, fabric: Literal["shared", "gloo"]) -> BenchCrew:
    """Ours, over one of the fabrics."""
    return paceline_crew(load, "allreduce", station=partial(OurTraining, task), fabric=fabric)


def ddp_crew(task: TrainingTask, load: ExchangeLoad) -> BenchCrew:
    """The other side."""
    folder = tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True)
    meeting = str(Path(folder.name) / "meeting")
    crew = BenchCrew("ddp", [partial(DDPTraining, task, load, rank, meeting) for rank in range(load.workers)])
    crew.at_end(folder.cleanup)
    return crew
