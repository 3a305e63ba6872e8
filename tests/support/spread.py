"""A store on several hosts for tests: an engine per further host, each behind wires that can be cut."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from paceline.engines.control import Ended
from paceline.engines.hosting import enrol
from paceline.engines.local import LocalEngine
from paceline.fabric.tls import Trust
from support.hosts import SECRET, Wire, listening
from support.ports import free_port
from support.runs import LONGEST_S, Lab, Run, children


class Spread:
    """A run whose store lies on this host and on some of the others."""

    def __init__(
        self, lab: Lab, engines: list[LocalEngine], script: str | Path, *args: object, here: int, **dials: Any
    ) -> None:
        self.lab, self.engines = lab, engines
        self.trust = Trust() if dials.get("tls") else None
        self.running, address = listening(lab, script, *args, here=here, **dials)
        self.wires = [Wire(address) for _ in engines]
        self.doors = [Wire(("127.0.0.1", free_port())) for _ in engines]
        """The ways to the coordinator, and those to the other hosts' portions."""

    def hosts(self, *workers: int) -> None:
        """Start the other hosts, with so many workers each."""
        self.started, self.pids = len(workers), dict(enumerate(self.running.pids))
        for number, count in enumerate(workers):
            self.host(number, count)

    def host(self, number: int, workers: int) -> None:
        """Start one of them, with so many workers."""
        via = "{}:{}".format(*self.wires[number].address)
        config, guest = enrol(via, SECRET, workers, self.lab.root / f"there{number}", 30, self.trust)
        door = self.doors[number]
        listen, reach = ("{}:{}".format(*address) for address in (door.target, door.address))
        guest = msgspec.structs.replace(guest, listen=listen, reach=reach)
        self.engines[number].launch(config, SECRET, guest)
        self.pids |= zip(guest.ranks, self.engines[number].pids, strict=True)

    def cut(self) -> None:
        """Cut every connection between hosts."""
        for wire in [*self.wires, *self.doors]:
            wire.cut()

    def cut_after(self, random: Random, times: int) -> None:
        """Cut every way by itself so often, each time after some bytes."""
        for wire in [*self.wires, *self.doors]:
            wire.cut_after([random.randrange(2000) for _ in range(times)])

    @property
    def all_cut(self) -> bool:
        """Whether there was enough on each for all of these cuts."""
        return all(wire.all_cut for wire in [*self.wires, *self.doors])

    def kill_worker(self, rank: int) -> None:
        """SIGKILL a worker, wherever it is."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGKILL)

    def kill_host(self, number: int) -> None:
        """SIGKILL everything on another host."""
        for pid in children(self.engines[number]._process.pid):
            os.kill(pid, signal.SIGKILL)

    def finish(self) -> Run:
        """Wait for all hosts."""
        run = self.lab.finish(self.running)
        self.ended: list[Ended] = []
        for engine in self.engines[: self.started]:
            ended = engine.wait(LONGEST_S)
            assert isinstance(ended, Ended), "another host hangs"
            self.ended.append(ended)
        for wire in [*self.wires, *self.doors]:
            wire.close()
        return run
