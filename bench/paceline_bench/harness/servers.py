"""A parameter server to compare the store with, reached by torch's RPC (Ray's way stands beside it).

It is given the best of it: gradients and weights are one flat tensor, so that nothing is split or
joined; the optimizer is the fastest of torch's; whoever receives the weights need not copy them.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline_bench.harness.crew import BenchCrew
from paceline_bench.harness.models import make_optimizer
from paceline_bench.harness.stations import ExchangeLoad

MANY_THREADS_BYTES = 4 << 20
MEET_TIMEOUT_S = 30.0


class PushServer:
    """Weights and an optimizer; a push is one step, and is answered with the weights."""

    def __init__(self, load: ExchangeLoad, variant: str) -> None:
        cores = os.cpu_count() or 1
        torch.set_num_threads(cores if load.size_bytes >= MANY_THREADS_BYTES else 1)
        self.weights = torch.zeros(load.size_bytes // 4)
        self._optimizer = make_optimizer(load.optimizer, [self.weights], variant)
        self._lock = threading.Lock()
        self.seen: set[int] = set()
        """The workers that pushed: a world of one that was to be four is found out here."""

    def push(self, rank: int, gradient: Tensor) -> Tensor:
        """Apply and answer."""
        with self._lock:
            self.seen.add(rank)
            self.weights.grad = gradient
            self._optimizer.step()
            return self.weights


class Client:
    """What the workers of every such server have in common."""

    def __init__(self, load: ExchangeLoad, rank: int) -> None:
        torch.set_num_threads(load.threads)
        self.world = 0
        self.rank = rank
        self.gradient = torch.empty(load.size_bytes // 4)
        self.received: Any = None

    def prepare(self) -> None:
        """The gradient is ready."""
        self.received = None
        self.gradient.fill_(1e-3)


def count_workers(ask: Callable[[], int], wanted: int) -> int:
    """How many workers the server has heard of, once all had the time to push."""
    deadline = time.monotonic() + MEET_TIMEOUT_S
    while (seen := ask()) < wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return seen


_server: PushServer | None = None


def _rpc_push(rank: int, gradient: Tensor) -> Tensor:
    assert _server is not None
    return _server.push(rank, gradient)


def _rpc_count() -> int:
    assert _server is not None
    return len(_server.seen)


class RpcStation(Client):
    """Pushes by `rpc_sync`."""

    def __init__(self, load: ExchangeLoad, rank: int, meeting: str) -> None:
        from torch.distributed import rpc

        super().__init__(load, rank)
        _meet(f"worker{rank}", rank + 1, load.workers + 1, meeting)
        self._rpc = rpc
        self.prepare()
        self.exchange()
        self.world = count_workers(lambda: int(rpc.rpc_sync("server", _rpc_count)), load.workers)

    def exchange(self) -> None:
        """Push and pull."""
        self.received = self._rpc.rpc_sync("server", _rpc_push, (self.rank, self.gradient))

    def close(self) -> None:
        """Leave, when all do."""
        self._rpc.shutdown()


def _meet(name: str, rank: int, world: int, meeting: str) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{meeting}", rpc_timeout=60, num_worker_threads=8
    )
    init: Any = rpc.init_rpc
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own use of a process group
        init(name, rank=rank, world_size=world, rpc_backend_options=options)


def serve_rpc(load: ExchangeLoad, variant: str, meeting: str) -> None:
    """The server's process; ends when all workers have left."""
    global _server
    from torch.distributed import rpc

    _server = PushServer(load, variant)
    _meet("server", 0, load.workers + 1, meeting)
    rpc.shutdown()


def rpc_crew(load: ExchangeLoad, variant: str) -> BenchCrew:
    """A torch RPC server and its workers."""
    folder = tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True)
    meeting = str(Path(folder.name) / "meeting")
    crew = BenchCrew("torch rpc", [partial(RpcStation, load, rank, meeting) for rank in range(load.workers)])
    crew.at_end(folder.cleanup)
    crew.help_with(serve_rpc, load, variant, meeting)
    return crew
