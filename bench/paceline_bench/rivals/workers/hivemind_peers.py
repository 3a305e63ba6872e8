"""Hivemind with local updates: every peer steps by itself, and weights are averaged in the background.

Matchmaking takes seconds, so gradients of small batches cannot be averaged step by step; it has local updates
instead. The server's process holds the first peer of the DHT, as `hivemind-dht` would. A peer that falls
behind loads the state of another.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from paceline.config import RunConfig
from paceline_bench.cluster.other import OtherPace, run

NAME = "hivemind"
ADDRESSES = "dht.txt"
ROUNDS = 8
"""Rounds between two averages, as for our `diloco`."""
MATCHMAKING_S = 3.0
"""What its documentation has for small local runs (3 to 5 s)."""
AVERAGING_S = 20.0
MEET_S = 120.0


class HivemindPace(OtherPace):
    """Its optimizer in the place of ours."""

    def __init__(self, config: RunConfig, snapshots: Path | None, told: argparse.Namespace) -> None:
        import hivemind

        rank, self._round = int(os.environ["RANK"]), told.batch * config.workers
        mine = os.environ["RIVAL_ADDRESS"]
        self._dht: Any = hivemind.DHT(
            initial_peers=_addresses(), host_maddrs=[f"/ip4/{mine}/tcp/0"], start=True
        )
        super().__init__(NAME, config, snapshots, rank, _present(self._dht, rank, config.workers))

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], scheduler: Any) -> Any:
        """Wrap the optimizer; it has the scheduler inside."""
        import hivemind

        self.module, self.scheduler = model, Epochs(self)
        settings = {name: optimizer.defaults[name] for name in ("lr", "momentum")}
        rule = scheduler.lr_lambdas[0]
        self.optimizer = hivemind.Optimizer(
            dht=self._dht,
            run_id="peers",
            batch_size_per_step=loader.batch_size,
            target_batch_size=ROUNDS * self._round,
            params=model.parameters(),
            optimizer=lambda params: SGD(params, **settings),
            scheduler=lambda inner: LambdaLR(inner, lambda epoch: rule(ROUNDS * epoch)),
            use_local_updates=True,
            matchmaking_time=MATCHMAKING_S,
            averaging_timeout=AVERAGING_S,
            verbose=False,
        )
        return model, HivemindStepped(self), self.deal(loader), self.scheduler

    def close(self) -> None:
        """Say good-bye to the swarm."""
        super().close()
        self.optimizer.shutdown()
        self._dht.shutdown()


class HivemindStepped:
    """In the optimizer's place, because its own has no hooks: wait for the device, then do as it does."""

    def __init__(self, pace: HivemindPace) -> None:
        self._pace = pace

    def step(self) -> None:
        """A gradient more."""
        self._pace.computed()
        self._pace.optimizer.step()

    def zero_grad(self) -> None:
        """It has a copy."""
        self._pace.optimizer.zero_grad()


class Epochs:
    """In the scheduler's place: the swarm has its own, and this only tells when a copy is due."""

    def __init__(self, pace: HivemindPace) -> None:
        self._pace = pace

    @property
    def last_epoch(self) -> int:
        """Steps of this peer."""
        return self._pace.steps

    def step(self) -> None:
        """Nothing."""


def _addresses() -> list[str]:
    path, deadline = Path(os.environ["RIVAL_FOLDER"]) / ADDRESSES, time.monotonic() + MEET_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"the first peer of the DHT was not there within {MEET_S:g} s")
        time.sleep(0.1)
    return path.read_text().split()


def _present(dht: Any, rank: int, workers: int) -> int:
    """How many workers the DHT knows of, once all had the time to come."""
    from hivemind.utils.timed_storage import get_dht_time

    dht.store("present", subkey=str(rank), value=rank, expiration_time=get_dht_time() + 600)
    deadline = time.monotonic() + MEET_S
    seen = 0
    while seen < workers and time.monotonic() < deadline:
        found = dht.get("present", latest=True)
        seen = 0 if found is None else len(found.value)
        time.sleep(0.1)
    return seen


def serve() -> None:
    """The first peer, until it is ended."""
    import hivemind

    folder, mine = Path(os.environ["RIVAL_FOLDER"]), os.environ["RIVAL_ADDRESS"]
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{mine}/tcp/0"], start=True)
    unfinished = folder / f"{ADDRESSES}.unfinished"
    unfinished.write_text(" ".join(str(each) for each in dht.get_visible_maddrs()))
    unfinished.rename(folder / ADDRESSES)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    serve() if os.environ.get("RIVAL_ROLE") == "server" else run(HivemindPace, NAME)
