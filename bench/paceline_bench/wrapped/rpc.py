"""torch.distributed.rpc: a server of one flat tensor in a process of its own, and who pushes to it."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.distributed import rpc

from paceline_bench.wrapped.server import FlatServer, present

SERVER = "server"
PATIENCE_S = 60
THREADS = 8

_server: FlatServer | None = None


class RpcClient:
    """A worker's side; workers have the ranks before the server's."""

    def __init__(self, rank: int, workers: int, where: str, tcp: bool = False) -> None:
        self._rank = rank
        _meet(f"worker{rank}", rank, workers, where, tcp)

    def push(self, gradient: Tensor) -> Any:
        """Push and pull."""
        return rpc.rpc_sync(SERVER, _push, (self._rank, gradient))

    def present(self, workers: int, within_s: float) -> int:
        """How many workers have come."""
        return present(lambda: int(rpc.rpc_sync(SERVER, _greet, (self._rank,))), workers, within_s)


def serve(server: FlatServer, workers: int, where: str, tcp: bool = False) -> None:
    """From now on this process answers for a server."""
    global _server
    _server = server
    _meet(SERVER, workers, workers, where, tcp)


def leave(graceful: bool = True) -> None:
    """When all do, or without the others: to leave together is to wait for the dead."""
    rpc.shutdown(graceful=graceful)


def _push(rank: int, gradient: Tensor) -> Any:
    assert _server is not None
    return _server.push(rank, gradient)


def _greet(rank: int) -> int:
    assert _server is not None
    return _server.greet(rank)


def _meet(name: str, rank: int, workers: int, where: str, tcp: bool) -> None:
    # held to TCP, hosts of a testbed use their links: they share memory, over which it would go round them
    held: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if tcp else {}
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=where, rpc_timeout=PATIENCE_S, num_worker_threads=max(THREADS, workers), **held
    )
    init: Any = rpc.init_rpc
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own use of a process group
        init(name, rank=rank, world_size=workers + 1, rpc_backend_options=options)
