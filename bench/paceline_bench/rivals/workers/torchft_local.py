"""torchft: LocalSGD or DiLoCo whose averages are taken by whoever lives. A worker is a replica group.

The lighthouse, which knows who lives, is the server's process; it also has a store at which all meet before
the first quorum, so that nobody begins without the others.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
from pathlib import Path
from typing import Any

from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.optim import SGD
from torch.utils.data import DataLoader

from paceline.config import RunConfig
from paceline_bench.cluster.other import OtherPace, run

SYNC_EVERY = {"torchft": 4, "torchft_diloco": 8}
"""Steps between two averages, as for our `local_sgd` and `diloco`."""
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""The outer optimizer of the paper on DiLoCo, which torchft's example has too."""
LIGHTHOUSE_PORT = 29510
MEETING_PORT = 29511
PATIENCE = datetime.timedelta(seconds=120)


class TorchftPace(OtherPace):
    """A manager, and the algorithm around the optimizer."""

    def __init__(self, config: RunConfig, snapshots: Path | None, told: argparse.Namespace) -> None:
        from torchft import Manager, ProcessGroupGloo

        rank, mine, server = int(os.environ["RANK"]), os.environ["RIVAL_ADDRESS"], os.environ["MASTER_ADDR"]
        self._meeting = TCPStore(server, MEETING_PORT, is_master=False, timeout=PATIENCE)
        own = TCPStore(mine, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        self._manager: Any = Manager(
            pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=30)),
            load_state_dict=self._take,
            state_dict=self._give,
            min_replica_size=1,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr=mine,
            store_port=own.port,
            lighthouse_addr=f"http://{server}:{LIGHTHOUSE_PORT}",
            replica_id=f"peer{rank}_",
            hostname=mine,
            init_sync=False,  # the seed is everybody's
        )
        self._own = own
        present = _meet(self._meeting, config.workers)
        super().__init__(os.environ["RIVAL"], config, snapshots, rank, present)

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], scheduler: Any) -> Any:
        """Enter the algorithm; it hooks onto the optimizer's steps."""
        from torchft.local_sgd import DiLoCo, LocalSGD

        self.module, self.optimizer, self.scheduler = model, optimizer, scheduler
        every = SYNC_EVERY[os.environ["RIVAL"]]
        if os.environ["RIVAL"] == "torchft":
            self._inside: Any = LocalSGD(self._manager, model, optimizer, sync_every=every)
        else:
            outer = SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
            self._inside = DiLoCo(self._manager, [model], optimizer, outer, sync_every=every)
        optimizer.register_step_pre_hook(lambda *_: self.computed())
        self._inside.__enter__()
        return model, optimizer, self.deal(loader), scheduler

    def close(self) -> None:
        """Leave the quorum."""
        self._manager.shutdown(wait=False)
        print(f"batches committed: {self._manager.batches_committed()}", flush=True)
        os._exit(0)  # threads of the manager would keep the process

    def _give(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _take(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _meet(store: TCPStore, workers: int) -> int:
    """Wait until so many have a manager, whose heart beats."""
    present = store.add("present", 1)
    if present == workers:
        store.set("all", "here")
    store.wait(["all"])
    return int(store.add("present", 0))


def serve() -> None:
    """The lighthouse, until it is ended; quorums are for all that live."""
    from torchft.coordination import LighthouseServer

    workers = int(os.environ["PEERS"])
    meeting = TCPStore(
        os.environ["RIVAL_ADDRESS"], MEETING_PORT, is_master=True, wait_for_workers=False, timeout=PATIENCE
    )
    lighthouse = LighthouseServer(
        bind=f"{os.environ['RIVAL_ADDRESS']}:{LIGHTHOUSE_PORT}",
        min_replicas=max(1, workers - 1),
        join_timeout_ms=60_000,
        quorum_tick_ms=50,
    )
    signal.sigwait({signal.SIGTERM})
    del lighthouse, meeting


if __name__ == "__main__":
    serve() if os.environ.get("RIVAL_ROLE") == "server" else run(TorchftPace, os.environ["RIVAL"])
