"""Our side, and torch's all-reduce: what one worker of each does between *ready* and *readable*."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config import RunConfig
from paceline.fabric.channel import Channel
from paceline.runtime.serve import serve
from paceline_bench.harness.crew import BenchCrew, Station
from paceline_bench.harness.models import Weights, make_optimizer, shapes

BUCKET_BYTES = 25 << 20
BALLAST_BYTES = 2 << 30
TOIL_S = 0.8
VARIANTS = ("plain", "foreach", "fused")
GLOO_WAYS = ("one flat all-reduce", "25 MB buckets, one by one", "25 MB buckets, all at once")


class ExchangeLoad(msgspec.Struct, frozen=True):
    """What is exchanged."""

    size_bytes: int
    optimizer: str
    workers: int
    seed: int = 0

    @property
    def threads(self) -> int:
        """Threads per worker, as both engines and torchrun's advice have it."""
        return max(1, (os.cpu_count() or 1) // self.workers)

    def weights(self) -> Weights:
        """The model."""
        return Weights(shapes(self.size_bytes), self.seed)


class PacelineStation:
    """A prepared model under a real owner process: `optimizer.step()` is the exchange."""

    def __init__(self, load: ExchangeLoad, config: RunConfig, rank: int, sock: socket.socket) -> None:
        import paceline
        from paceline.runtime import seat

        torch.set_num_threads(load.threads)
        seat.take(seat.Seat(rank, config, Channel(sock)))
        self._pace = paceline.join()
        model = load.weights()
        self._parameters = list(model.parameters())
        optimizer = make_optimizer(load.optimizer, self._parameters, None)
        _, self._optimizer = self._pace.prepare(model, optimizer)
        self.world = self._pace.size

    def prepare(self) -> None:
        """What a script does and backward leaves behind: gradients, cleared and then filled in place."""
        self._optimizer.zero_grad()
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.fill_(1e-3)

    def exchange(self) -> None:
        """Push, wait, have fresh weights."""
        self._optimizer.step()

    def toil(self) -> None:
        """Exchange without a pause, for a while."""
        end = time.monotonic() + TOIL_S
        while time.monotonic() < end:
            self.prepare()
            self.exchange()

    def hold_memory(self) -> None:
        """Become a large process: what it has touched must be freed before it is really gone."""
        self._ballast = torch.ones(BALLAST_BYTES // 4)

    def close(self) -> None:
        """Leave the run."""
        self._pace.depart()


def paceline_crew(
    load: ExchangeLoad,
    protocol: str,
    folder: str | None = None,
    station: Callable[..., Station] = PacelineStation,
    serve: Callable[..., object] = serve,
    fabric: Literal["shared", "gloo"] = "shared",
    dials: Mapping[str, Any] = MappingProxyType({}),
) -> BenchCrew:
    """Our side: workers, and the owner of the store as every run has it. `folder`: keep the run there;
    `dials`: whatever else of the run's configuration."""
    kept = folder or tempfile.mkdtemp(prefix="paceline-bench-")
    usual: dict[str, Any] = {
        "workers": load.workers,
        "protocol": protocol,
        "seed": load.seed,
        "fabric": fabric,
    }
    config = RunConfig(run="bench", folder=kept, **(usual | dict(dials)))
    pairs = [Channel.pair() for _ in range(load.workers)]
    builds = [partial(station, load, config, rank, mine) for rank, (mine, _) in enumerate(pairs)]
    crew = BenchCrew("paceline", builds)
    if folder is None:
        crew.at_end(partial(shutil.rmtree, kept, ignore_errors=True))
    crew.help_with(hold_store, serve, config, [theirs for _, theirs in pairs], crew.pids)
    for mine, theirs in pairs:
        mine.close()
        theirs.close()
    return crew


def hold_store(
    serve: Callable[..., object], config: RunConfig, ends: Sequence[socket.socket], pids: Sequence[int]
) -> None:
    """The owner's process, as the local engine starts it."""
    serve(config, [(Channel(end), pid) for end, pid in zip(ends, pids, strict=True)], os.eventfd(0))


class GlooStation:
    """What DDP does once backward is over: all-reduce the gradient buckets, then step.

    The gradients are views of the buckets already (`gradient_as_bucket_view`), and the division by
    the world size is left out of the time, since DDP does it while backward runs.
    """

    def __init__(self, load: ExchangeLoad, rank: int, meeting: str, variant: str, way: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(load.threads)
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=load.workers)
        self.world = dist.get_world_size()
        parameters = list(load.weights().parameters())
        self._buckets = bucket(parameters, BUCKET_BYTES if "buckets" in way else 2 * load.size_bytes)
        self._at_once = "at once" in way
        self._optimizer = make_optimizer(load.optimizer, parameters, variant)

    def prepare(self) -> None:
        """Gradients, in place."""
        for flat in self._buckets:
            flat.fill_(1e-3)

    def exchange(self) -> None:
        """All-reduce and step."""
        if self._at_once:
            for work in [dist.all_reduce(flat, async_op=True) for flat in self._buckets]:
                work.wait()
        else:
            for flat in self._buckets:
                dist.all_reduce(flat)
        self._optimizer.step()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def bucket(parameters: Sequence[Tensor], size_bytes: int) -> list[Tensor]:
    """Flat gradient buckets, last parameters first as DDP fills them; `.grad` becomes a view of them."""
    groups: list[list[Tensor]] = [[]]
    filled = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        if filled and filled + size > size_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += size
    return [_flatten(group) for group in groups]


def _flatten(parameters: Sequence[Tensor]) -> Tensor:
    flat = torch.zeros(sum(p.numel() for p in parameters))
    offset = 0
    for parameter in parameters:
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return flat


def gloo_crew(load: ExchangeLoad, variant: str, way: str) -> BenchCrew:
    """The other side."""
    folder = tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True)
    meeting = str(Path(folder.name) / "meeting")
    builds = [partial(GlooStation, load, rank, meeting, variant, way) for rank in range(load.workers)]
    crew = BenchCrew("gloo", builds)
    crew.at_end(folder.cleanup)
    return crew


def fastest_variant(load: ExchangeLoad, threads: int, *, flat: bool = False) -> str:
    """The optimizer implementation that suits the other side best: plain, foreach or fused."""
    parameters = [torch.zeros(load.size_bytes // 4)] if flat else list(load.weights().parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    took = {way: _step_s(make_optimizer(load.optimizer, parameters, way)) for way in VARIANTS}
    torch.set_num_threads(before)
    return min(took, key=lambda way: took[way])


def _step_s(optimizer: torch.optim.Optimizer) -> float:
    optimizer.step()
    seen = []
    for _ in range(5):
        began = time.perf_counter()
        optimizer.step()
        seen.append(time.perf_counter() - began)
    return min(seen)
