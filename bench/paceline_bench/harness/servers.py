"""A parameter server to compare the store with, reached by torch's RPC (Ray's way stands beside it).

It is given the best of it: gradients and weights are one flat tensor, so that nothing is split or
joined; the optimizer is the fastest of torch's; whoever receives the weights need not copy them.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline_bench.harness.crew import BenchCrew
from paceline_bench.harness.models import make_optimizer
from paceline_bench.harness.stations import ExchangeLoad
from paceline_bench.wrapped import rpc
from paceline_bench.wrapped.server import FlatServer

MANY_THREADS_BYTES = 4 << 20
MEET_TIMEOUT_S = 30.0


class PushServer(FlatServer):
    """Weights and an optimizer; a push is one step, and is answered with the weights."""

    def __init__(self, load: ExchangeLoad, variant: str) -> None:
        super().__init__()
        cores = os.cpu_count() or 1
        torch.set_num_threads(cores if load.size_bytes >= MANY_THREADS_BYTES else 1)
        self.weights = torch.zeros(load.size_bytes // 4)
        self._optimizer = make_optimizer(load.optimizer, [self.weights], variant)

    def apply(self, gradient: Tensor) -> Tensor:
        """Step."""
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


class RpcStation(Client):
    """Pushes by `rpc_sync`."""

    def __init__(self, load: ExchangeLoad, rank: int, meeting: str) -> None:
        super().__init__(load, rank)
        self._client = rpc.RpcClient(rank, load.workers, f"file://{meeting}")
        self.prepare()
        self.exchange()
        self.world = self._client.present(load.workers, MEET_TIMEOUT_S)

    def exchange(self) -> None:
        """Push and pull."""
        self.received = self._client.push(self.gradient)

    def close(self) -> None:
        """Leave, when all do."""
        rpc.leave()


def serve_rpc(load: ExchangeLoad, variant: str, meeting: str) -> None:
    """The server's process; ends when all workers have left."""
    rpc.serve(PushServer(load, variant), load.workers, f"file://{meeting}")
    rpc.leave()


def rpc_crew(load: ExchangeLoad, variant: str) -> BenchCrew:
    """A torch RPC server and its workers."""
    folder = tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True)
    meeting = str(Path(folder.name) / "meeting")
    crew = BenchCrew("torch rpc", [partial(RpcStation, load, rank, meeting) for rank in range(load.workers)])
    crew.at_end(folder.cleanup)
    crew.help_with(serve_rpc, load, variant, meeting)
    return crew
