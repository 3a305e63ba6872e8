"""The processes of one side of a comparison, led round by round.

A round has a prelude that is not timed (gradients become ready), a start that all workers hear at
the same moment, and an end that each takes on its own clock, which all processes of a host share.
Between its rounds a side sleeps in the kernel, so that it does not disturb the other's.

Whoever does not answer in time, breaks, or has another world size than it was asked for ends the
benchmark: a figure of two processes that were really one is worse than none.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from paceline.decoding import MessageDecoder
from paceline.errors import RunError
from paceline.fabric.channel import Channel

PRELOAD = ["paceline_bench.harness.warm"]
START_TIMEOUT_S = 120.0
ROUND_TIMEOUT_S = 60.0
END_TIMEOUT_S = 20.0
NOTICE_S = 1e-3
"""How long before a common start it is announced: told one after another, workers start one after another."""


class Station(Protocol):
    """What one worker of a side does in a round."""

    world: int
    """How many workers the system under test says there are."""

    def prepare(self) -> None:
        """Have the gradients ready."""

    def exchange(self) -> None:
        """What is timed."""

    def close(self) -> None:
        """Leave."""


class Present(msgspec.Struct, frozen=True, tag=True):
    """A worker is there."""

    pid: int
    world: int


class CrewOrder(msgspec.Struct, frozen=True, tag=True):
    """Call this method of the station, at a moment on the clock that all processes share."""

    method: str
    at: float


class CrewDone(msgspec.Struct, frozen=True, tag=True):
    """It was called: from when to when."""

    began: float
    ended: float


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Something was raised."""

    text: str


Answer = Present | CrewDone | Broken
_answers: MessageDecoder[Answer] = MessageDecoder(Answer)
_orders: MessageDecoder[CrewOrder] = MessageDecoder(CrewOrder)


class BenchCrew:
    """One side: a process per station, and helpers (a store, a server) that need no leading."""

    def __init__(
        self, name: str, stations: Sequence[Callable[[], Station]], world: int | None = None
    ) -> None:
        self.name = name
        self.workers = len(stations)
        self.patience_s = ROUND_TIMEOUT_S
        self._world = len(stations) if world is None else world
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._processes: list[BaseProcess] = []
        self._channels: list[Channel] = []
        self._helpers: list[BaseProcess] = []
        self._ends: list[Callable[[], None]] = []
        try:
            for build in stations:
                self._start(build)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BenchCrew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the workers, by rank."""
        return [process.pid or 0 for process in self._processes]

    @property
    def cpu_s(self) -> float:
        """Processor time that workers and helpers have used so far, all threads together."""
        return sum(_cpu_s(process.pid or 0) for process in [*self._processes, *self._helpers])

    def help_with(self, target: Callable[..., Any], *args: Any) -> None:
        """Start a helper; it ends by itself when the workers are gone."""
        self._helpers.append(self._launch(target, args))

    def at_end(self, action: Callable[[], None]) -> None:
        """Call this once all processes are gone."""
        self._ends.append(action)

    def muster(self) -> None:
        """Wait until everybody is there, and check that it is everybody."""
        present = [self._receive(rank, START_TIMEOUT_S) for rank in range(self.workers)]
        worlds = [answer.world for answer in present if isinstance(answer, Present)]
        pids = {answer.pid for answer in present if isinstance(answer, Present)}
        if len(pids) != self.workers or any(world != self._world for world in worlds):
            raise RunError(
                f"{self.name} was asked for a world of {self._world} in {self.workers} processes, but it had "
                f"worlds of {worlds} in {len(pids)} processes. Nothing measured on it would mean anything."
            )

    def round(self) -> float:
        """One aligned round: the longest that any worker took."""
        self.call("prepare")
        return max(done.ended - done.began for done in self.call("exchange"))

    def block(self, rounds: int) -> list[float]:
        """Several rounds."""
        return [self.round() for _ in range(rounds)]

    def call(self, method: str, ranks: Sequence[int] | None = None) -> list[CrewDone]:
        """Have stations do something at the same moment; wait for all."""
        chosen = range(self.workers) if ranks is None else ranks
        at = time.perf_counter() + NOTICE_S
        for rank in chosen:
            self.tell(rank, method, at)
        return [self.hear(rank) for rank in chosen]

    def tell(self, rank: int, method: str, at: float = 0.0) -> None:
        """Have one station do something, without waiting."""
        self._channels[rank].send(CrewOrder(method, at))

    def hear(self, rank: int) -> CrewDone:
        """The answer to what one station was told."""
        answer = self._receive(rank, self.patience_s)
        assert isinstance(answer, CrewDone)
        return answer

    def close(self) -> None:
        """Send everybody home; whoever does not go is ended."""
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + END_TIMEOUT_S
        for process in [*self._processes, *self._helpers]:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for action in self._ends:
            action()
        self._channels, self._ends = [], []

    def _start(self, build: Callable[[], Station]) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channels.append(Channel(mine))
        self._processes.append(self._launch(_work, (build, theirs)))
        theirs.close()

    def _launch(self, target: Callable[..., Any], args: tuple[Any, ...]) -> BaseProcess:
        process = self._context.Process(target=target, args=args, daemon=True)
        process.start()
        return process

    def _receive(self, rank: int, timeout_s: float) -> Present | CrewDone:
        ready, _, _ = select.select([self._channels[rank]], [], [], timeout_s)
        if not ready:
            raise RunError(f"{self.name}: rank {rank} has been silent for {timeout_s:g} s.")
        received = self._channels[rank].receive(_answers)
        if received is None:
            raise RunError(f"{self.name}: the process of rank {rank} ended unexpectedly.")
        if isinstance(received[0], Broken):
            raise RunError(f"{self.name}: rank {rank} failed.\n{received[0].text}")
        return received[0]


def in_turns(crews: Sequence[BenchCrew], blocks: int, rounds: int) -> list[list[list[float]]]:
    """Blocks of rounds, ABAB...: per crew, per block, the seconds of each round."""
    seen: list[list[list[float]]] = [[] for _ in crews]
    for _ in range(blocks):
        for crew, times in zip(crews, seen, strict=True):
            times.append(crew.block(rounds))
    return seen


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work(build: Callable[[], Station], sock: socket.socket) -> None:
    """A worker's life: build the station, then do as told until nobody tells any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(sock)
    try:
        station = build()
        channel.send(Present(os.getpid(), station.world))
        while (received := channel.receive(_orders)) is not None:
            channel.send(_obey(station, received[0]))
        station.close()
    except Exception:
        channel.send(Broken(traceback.format_exc()))
        raise


def _obey(station: Station, order: CrewOrder) -> CrewDone:
    action = getattr(station, order.method)
    time.sleep(max(0.0, order.at - time.perf_counter()))
    began = time.perf_counter()
    action()
    return CrewDone(began, time.perf_counter())
