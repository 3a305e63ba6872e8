"""A parameter server behind torch.distributed.rpc, and its workers."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from torch import Tensor

from paceline.config import RunConfig
from paceline_bench.cluster.other import config_of, parser, run
from paceline_bench.cluster.script import options
from paceline_bench.rivals.workers.serving import ParameterServer, ServedPace
from paceline_bench.wrapped import rpc

NAME = "rpc"
MEET_S = 60.0


class RpcPace(ServedPace):
    """Pushes by `rpc_sync`."""

    def __init__(self, config: RunConfig, snapshots: Path | None, told: argparse.Namespace) -> None:
        rank = int(os.environ["RANK"])
        self._client = rpc.RpcClient(rank, config.workers, _where(), tcp=True)
        super().__init__(NAME, config, snapshots, rank, self._client.present(config.workers, MEET_S))

    def exchange(self, gradient: Tensor) -> tuple[Tensor, int]:
        """Push and pull."""
        answer: tuple[Tensor, int] = self._client.push(gradient)
        return answer

    def close(self) -> None:
        """Leave without the others, who may be dead."""
        super().close()
        rpc.leave(graceful=False)


def serve() -> None:
    """The server's process; it serves until it is ended, whoever dies meanwhile."""
    mine, words = parser().parse_known_args()
    told = options(words)
    workers = config_of(mine, told.seed, NAME).workers
    rpc.serve(ParameterServer(told, workers), workers, _where(), tcp=True)
    signal.sigwait({signal.SIGTERM})


def _where() -> str:
    return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


if __name__ == "__main__":
    serve() if os.environ.get("RIVAL_ROLE") == "server" else run(RpcPace, NAME)
