"""A parameter server behind torch.distributed.rpc, and its workers."""

from __future__ import annotations

import argparse
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import rpc

from paceline.config import RunConfig
from paceline_bench.cluster.other import config_of, parser, run
from paceline_bench.cluster.script import options
from paceline_bench.rivals.workers.serving import ParameterServer, ServedPace

NAME = "rpc"
SERVER = "server"
MEET_S = 60.0

_server: ParameterServer | None = None


def _push(rank: int, gradient: Tensor) -> tuple[Tensor, int]:
    assert _server is not None
    return _server.push(rank, gradient)


def _greet(rank: int) -> int:
    assert _server is not None
    return _server.greet(rank)


class RpcPace(ServedPace):
    """Pushes by `rpc_sync`."""

    def __init__(self, config: RunConfig, snapshots: Path | None, told: argparse.Namespace) -> None:
        rank = int(os.environ["RANK"])
        _meet(f"worker{rank}", rank, config.workers)
        super().__init__(NAME, config, snapshots, rank, _present(rank, config.workers))

    def exchange(self, gradient: Tensor) -> tuple[Tensor, int]:
        """Push and pull."""
        answer: tuple[Tensor, int] = rpc.rpc_sync(SERVER, _push, (self.rank, gradient))
        return answer

    def close(self) -> None:
        """Leave without the others: to leave together, as its tutorial has it, is to wait for the dead."""
        super().close()
        rpc.shutdown(graceful=False)


def _present(rank: int, workers: int) -> int:
    deadline = time.monotonic() + MEET_S
    while (seen := int(rpc.rpc_sync(SERVER, _greet, (rank,)))) < workers and time.monotonic() < deadline:
        time.sleep(0.05)
    return seen


def _meet(name: str, rank: int, workers: int) -> None:
    where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    threads = max(8, workers)
    # held to TCP: hosts of a testbed share memory, over which it would go round the links otherwise
    pipe = rpc.TensorPipeRpcBackendOptions(
        init_method=where,
        rpc_timeout=60,
        num_worker_threads=threads,
        _transports=["uv"],
        _channels=["basic"],
    )
    init: Any = rpc.init_rpc
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own use of a process group
        init(name, rank=rank, world_size=workers + 1, rpc_backend_options=pipe)


def serve() -> None:
    """The server's process; it serves until it is ended, whoever dies meanwhile."""
    global _server
    mine, words = parser().parse_known_args()
    told = options(words)
    workers = config_of(mine, told.seed, NAME).workers
    _server = ParameterServer(told, workers)
    _meet(SERVER, workers, workers)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    # the module as others see it: functions that travel are found by its name
    from paceline_bench.rivals.workers import rpc as named

    named.serve() if os.environ.get("RIVAL_ROLE") == "server" else run(named.RpcPace, NAME)
