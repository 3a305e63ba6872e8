"""Ray: one actor per worker, wherever Ray has room; the store is on the driver's host.

The script runs in a child of the actor's process, not in that process itself: there Ray has its own
`__main__`, signal handlers, threads and output, and a script that exits or crashes would take the
actor, and with it the log, along. Child and actor die together. Arguments and answers travel as Ray
sends them, pickled among the processes of its own cluster; they are bytes and numbers, and gradients
and weights never go that way.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from paceline.config import RunConfig
from paceline.decoding import decode_json
from paceline.engines.control import Ended
from paceline.engines.held import HeldStore
from paceline.engines.meeting import over_hosts
from paceline.engines.ray_cluster import RayCluster, check_ray, first_line, the_ray
from paceline.engines.worker import WorkerOrder, start_worker
from paceline.errors import ConfigError, RunError
from paceline.fabric.choice import listening
from paceline.fabric.wire import new_secret
from paceline.trace import read_trace
from paceline.trace.events import WorkerJoined

ROOM_S = 60.0
"""How long Ray may take to find room for the workers."""
START_S = 120.0
"""How long it may take to start its actors there."""
LATE_S = 10.0
"""How long workers are waited for once the run is over: Ray takes a minute to find a node lost."""
LOOK_S = 1.0
KILLED = -9
"""Status of a worker whose actor died: its process was killed with it."""
PIECE = 1 << 20
"""Bytes of output that travel at once."""


class WorkerActor:
    """One worker: a process on the node Ray chose, what it prints, how it ends."""

    def where(self) -> tuple[str, str, int]:
        """The node, its host's name, and its cores."""
        ray = the_ray()
        return ray.get_runtime_context().get_node_id(), socket.gethostname(), os.cpu_count() or 1

    def start(self, order: bytes) -> tuple[int, str]:
        """The worker's process id, or what is missing here."""
        told = decode_json(order, kind=WorkerOrder)
        script = Path(told.folder) / str(told.config.script)
        if not script.is_file():
            return 0, f"no script at {script} on host {socket.gethostname()}"
        folder = told.folder if Path(told.folder).is_dir() else str(script.parent)
        self._process = start_worker(msgspec.structs.replace(told, folder=folder))
        self._ended = os.pidfd_open(self._process.pid)
        return self._process.pid, ""

    def more(self) -> tuple[bytes, int | None]:
        """What it printed since the last call, once there is something; its status if it has ended."""
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        os.set_blocking(output, False)
        select.select([output, self._ended], [], [], ROOM_S)
        status = self._process.poll()
        data = b""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(output, PIECE):
                data += piece
        return data, status


class RayEngine:
    """Starts one run at a time on a Ray."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._cluster: RayCluster | None = None
        self._store: HeldStore | None = None
        self._room: Any = None
        self._actors: list[Any] = []
        self._calls: dict[Any, int] = {}
        self._statuses: dict[int, int] = {}
        self._over_since: float | None = None
        self.hosts: dict[int, str] = {}
        """Where each rank runs."""
        self.pids: tuple[int, ...] = ()
        """Of the workers, by rank, on their hosts."""

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def launch(self, config: RunConfig, secret: str = "") -> None:
        """Find room, start the store here and the workers there."""
        self._config = config
        self._statuses, self._calls, self._over_since = {}, {}, None
        self._cluster = self._cluster or RayCluster(self._address, config.workers)
        self._actors = self._place(config.workers)
        asked = [actor.where.remote() for actor in self._actors]
        self._store = HeldStore(listening(config, self._cluster.listen), secret or new_secret())
        places = self._ask(asked)
        self.hosts = {rank: host for rank, (_, host, _) in enumerate(places)}
        away = [rank for rank, host in self.hosts.items() if host != socket.gethostname()]
        if config.mesh is not None and away:
            raise over_hosts(config.mesh, f"Ray placed rank {away[0]} on {self.hosts[away[0]]}")
        self._start(self._store, places)

    def wait(self, timeout_s: float) -> Ended | None:
        """The end of the run, if it comes within this time."""
        assert self._store is not None, "a run was launched"
        until = time.monotonic() + timeout_s
        while self._calls and (left := until - time.monotonic()) > 0:
            self._listen(min(left, LOOK_S))
            self._give_up(self._store)
        status = None if self._calls else self._store.wait(max(0.0, until - time.monotonic()))
        if status is None:
            return None
        self._release()
        return Ended(self._statuses, status, self.hosts)

    def stop(self) -> None:
        """Ask the run to end and to save its state."""
        if self._store is not None:
            self._store.stop()

    def close(self) -> None:
        """End everything that is left."""
        if self._store is not None:
            self._store.close()
        if self._cluster is not None:
            self._release()
            self._cluster.close()
        self._cluster = self._store = None

    def _place(self, workers: int) -> list[Any]:
        """An actor for each worker; those of one node share its memory, so as few nodes as possible."""
        ray = the_ray()
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._room = placement_group([{"CPU": 1}] * workers, strategy="PACK")
        if not self._room.wait(ROOM_S):
            there = ray.available_resources().get("CPU", 0)
            raise ConfigError(
                f"Ray found no room for {workers} workers of 1 CPU each within {ROOM_S:g} s; {there:g} CPUs "
                "are free. Use fewer --workers, or add nodes."
            )
        remote: Any = ray.remote(WorkerActor)
        return [
            remote.options(
                num_cpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._room, placement_group_bundle_index=rank
                ),
            ).remote()
            for rank in range(workers)
        ]

    def _start(self, store: HeldStore, places: list[tuple[str, str, int]]) -> None:
        """Each worker gets its share of its node's cores."""
        here = the_ray().get_runtime_context().get_node_id()
        neighbours = Counter(node for node, _, _ in places)
        calls = []
        for rank, (node, _, cores) in enumerate(places):
            threads, beside = max(1, cores // neighbours[node]), node == here
            order = WorkerOrder(
                config=self._config,
                meeting=store.meeting,
                rank=rank,
                threads=threads,
                local=(sum(other == node for other, _, _ in places[:rank]), neighbours[node]),
                beside=beside,
                folder=os.getcwd(),
            )
            calls.append(self._actors[rank].start.remote(msgspec.json.encode(order)))
        started = self._ask(calls)
        missing = [problem for _, problem in started if problem]
        if missing:
            raise ConfigError(f"{missing[0]}. Every node needs it at the same path.")
        self.pids = tuple(pid for pid, _ in started)
        self._calls = {actor.more.remote(): rank for rank, actor in enumerate(self._actors)}

    def _ask(self, calls: list[Any]) -> list[Any]:
        ray = the_ray()
        try:
            return list(ray.get(calls, timeout=START_S))
        except ray.exceptions.RayError as error:
            raise RunError(f"Ray could not start the workers: {first_line(error)}") from None

    def _listen(self, timeout_s: float) -> None:
        """Keep what workers printed, and note who ended."""
        ray = the_ray()
        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        for call in ready:
            rank = self._calls[call]
            try:
                data, status = ray.get(call)
            except ray.exceptions.RayError as error:
                data, status = f"the actor of this worker is gone: {first_line(error)}\n".encode(), KILLED
            with (self._config.path / "logs" / f"rank{rank}.log").open("ab") as log:
                log.write(data)
            if status is None:
                self._calls[self._actors[rank].more.remote()] = rank
            else:
                self._note_end(rank, status)
            del self._calls[call]  # last: Ctrl-C may come anywhere above, and then it is heard again

    def _give_up(self, store: HeldStore) -> None:
        """Wait for nobody who should have ended with the run long ago."""
        if self._over_since is None and store.wait(0) is not None:
            self._over_since = time.monotonic()
        if self._over_since is not None and time.monotonic() - self._over_since > LATE_S:
            self._statuses |= dict.fromkeys(self._calls.values(), KILLED)
            self._calls = {}

    def _note_end(self, rank: int, status: int) -> None:
        self._statuses[rank] = status
        if status != 0 and self._store is not None and not self._has_begun():
            text = f"its process on host {self.hosts[rank]} ended with status {status}"
            self._store.speak_for(rank, text)

    def _has_begun(self) -> bool:
        """Whether the store knows the workers, and so hears by itself when one is lost."""
        trace = self._config.path / "trace.jsonl"
        with contextlib.suppress(RunError, OSError, ValueError):
            return any(isinstance(event, WorkerJoined) for event in read_trace(trace))
        return False

    def _release(self) -> None:
        """Give back what Ray lent us."""
        ray = the_ray()
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._calls = [], {}
        if self._room is not None:
            remove_placement_group(self._room)
            self._room = None


def check(where: str | None) -> None:
    """Whether Ray is installed, and somebody is there."""
    check_ray(where)


def opened(script: str | None, where: str | None) -> RayEngine:
    """The engine, until the runs are over."""
    return RayEngine(where)
