"""Real runs for tests: forked workers on one warm engine, and what is left of them afterwards.

    run = lab.run("train.py", "mlp", workers=4, protocol="ssp", slow={3: 3.0})
    assert run.result.status == "finished"
    assert run.used() == once(epochs=2, samples=64)

Every process that a test starts carries a token in its environment, so that leftovers are found
by it, whoever their parent is by then, and nobody else's processes are mistaken for ours.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors.torch import load_file
from torch import Tensor

from paceline.config import RunConfig
from paceline.engines.control import Ended
from paceline.engines.local import LocalEngine
from paceline.trace import Result, read_trace, tally
from paceline.trace.events import AnyEvent, Decided, Event, RunEnded, WorkerJoined, WorkerLeft
from support.stops import stop_arrived, stop_is_called

SCRIPTS = Path(__file__).parent.parent / "e2e" / "scripts"
TOKEN = "PACELINE_TESTS"
LONGEST_S = 100.0
"""After this a run counts as hung."""

Places = Counter[tuple[int, int]]
"""How often each (epoch, position) was used."""


def once(epochs: int, samples: int) -> Places:
    """Every position of every epoch, exactly once."""
    return Counter((epoch, position) for epoch in range(epochs) for position in range(samples))


@dataclass(frozen=True)
class Run:
    """A run that is over, as a user finds it."""

    config: RunConfig
    ended: Ended

    @property
    def folder(self) -> Path:
        return self.config.path

    @cached_property
    def trace(self) -> list[AnyEvent]:
        return list(read_trace(self.folder))

    @cached_property
    def result(self) -> Result:
        return tally(self.trace).result()

    @property
    def end(self) -> RunEnded:
        last = self.trace[-1]
        assert isinstance(last, RunEnded), f"the trace ends with {last}"
        return last

    @property
    def pushes(self) -> list[Decided]:
        return [e for e in self.of(Decided) if e.pushed is not None]

    @property
    def died(self) -> set[int]:
        return {e.worker for e in self.of(WorkerLeft) if e.reason == "died"}

    @property
    def weights(self) -> dict[str, Tensor]:
        return load_file(self.folder / "weights.safetensors")

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.trace if isinstance(event, kind)]

    def used(self) -> Places:
        """Which positions of which epochs went into pushes, and how often."""
        return self.used_by(self.pushes)

    @staticmethod
    def used_by(pushes: Iterable[Decided]) -> Places:
        """The same, of some of them."""
        places: Places = Counter()
        for push in pushes:
            for epoch, first, size in push.work:
                places.update((epoch, position) for position in range(first, first + size))
        return places

    def log(self, name: str = "rank0") -> str:
        """What a process printed."""
        return (self.folder / "logs" / f"{name}.log").read_text()

    def logs(self) -> str:
        """What all of them printed."""
        names = sorted(path.stem for path in (self.folder / "logs").glob("*.log"))
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in names)


class Running:
    """A run in progress."""

    def __init__(self, engine: LocalEngine, config: RunConfig, secret: str = "") -> None:
        self.engine, self.config = engine, config
        engine.launch(config, secret)
        self.pids = engine.pids

    def events(self, kind: type[Event]) -> int:
        """How many events of a kind the trace holds by now."""
        path = self.config.path / "trace.jsonl"
        if not path.exists() or not path.stat().st_size:
            return 0
        return sum(isinstance(event, kind) for event in read_trace(path))

    def until_training(self) -> None:
        """Wait until all workers have joined."""
        wait_until(lambda: self.events(WorkerJoined) >= self.config.workers, "training begins")

    def until_pushes(self, number: int) -> None:
        """Wait until the trace shows this many decisions."""
        wait_until(lambda: self.events(Decided) >= number, f"{number} decisions are made")

    def kill(self, rank: int) -> None:
        """SIGKILL a worker; nothing happens if it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGKILL)

    @property
    def store_pid(self) -> int:
        """The process that owns the store."""
        return max(set(children(self.engine._process.pid)) - set(self.pids))

    def stop(self) -> None:
        """Ask for the end, and wait until nothing that workers do from now on can come before it."""
        zygote, config = self.engine._process.pid, self.config
        lone = config.workers == 1 and config.cluster is None and config.listen is None
        conductor = 0 if lone else self.store_pid
        for _ in range(1 + lone):  # one worker is sent a signal, which is on its way when the next is heard
            self.engine.stop()
        wait_until(lambda: stop_arrived(zygote, 1 + lone), "the stop has been passed on")
        if config.mesh is not None and not lone:
            wait_until(lambda: stop_is_called(conductor, config.workers), "the workers are called")

    def finish(self, timeout_s: float = LONGEST_S) -> Run:
        """Wait for the end."""
        ended = self.engine.wait(timeout_s)
        assert ended is not None, f"the run hangs:\n{_tail(self.config.path)}"
        return Run(self.config, ended)


class Lab:
    """One warm engine, and a folder for the runs and scripts of one test after another."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.token = uuid4().hex
        self._engine: LocalEngine | None = None
        self._running: Running | None = None
        self._numbers = count()
        self.further: set[int] = set()
        """Other engines, which may stay."""
        os.environ[TOKEN] = self.token

    @property
    def engine(self) -> LocalEngine:
        """The engine; a new one if the last was lost."""
        if self._engine is None or self._engine._process.poll() is not None:
            self._engine = LocalEngine()
        return self._engine

    def script(self, text: str) -> Path:
        """Write a script for this test."""
        path = self.root / f"script{next(self._numbers)}.py"
        path.write_text(text)
        return path

    def config(self, script: str | Path, *args: object, **dials: Any) -> RunConfig:
        """A run's configuration; scripts are looked up beside the tests."""
        run = f"run{next(self._numbers)}"
        folder = self.root / run
        folder.mkdir(parents=True)
        path = script if isinstance(script, Path) else SCRIPTS / script
        return RunConfig(run=run, folder=str(folder), script=str(path), args=tuple(map(str, args)), **dials)

    def start(self, script: str | Path, *args: object, **dials: Any) -> Running:
        """Begin a run."""
        assert self._running is None, "the last run was not waited for"
        self._running = Running(self.engine, self.config(script, *args, **dials))
        return self._running

    def finish(self, running: Running) -> Run:
        """Wait for the end of what `start` began."""
        run = running.finish()
        self._running = None
        return run

    def run(self, script: str | Path, *args: object, **dials: Any) -> Run:
        """A whole run."""
        return self.finish(self.start(script, *args, **dials))

    def trained(self, script: str | Path, *args: object, **dials: Any) -> Run:
        """A whole run that has to finish."""
        run = self.run(script, *args, **dials)
        assert run.result.status == "finished", f"{run.end.detail}\n{run.logs()}"
        return run

    def pause(self, before: int, *doomed: int, only: int | None = None) -> tuple[object, ...]:
        """Options of a script: wait before an iteration for the file `go on`, all or one only: `Pause`."""
        words = ("--pause", self.root / "go on", "--before", before)
        return (
            *words,
            *(("--doomed", *doomed) if doomed else ()),
            *(() if only is None else ("--only", only)),
        )

    def go_on(self) -> None:
        """Let them."""
        (self.root / "go on").touch()

    def until_paused(self, workers: int) -> None:
        """Wait until so many workers wait for the file `go on`."""
        wait_until(lambda: len(list(self.root.glob("go on.*"))) >= workers, "workers have paused")

    def settle(self) -> None:
        """After a test: nothing but the idle engine may be left. A broken one is thrown away."""
        if self._running is not None:
            self._running = None
            self.close()
        wait_until(lambda: self.leftovers() <= self.idle, "all processes of the run are gone", 20)
        if self._engine is not None and self._engine._process.poll() is None:
            assert not children(self._engine._process.pid), "the engine has children left"

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @property
    def idle(self) -> set[int]:
        """What may be there between runs: the engine."""
        return self.further | (set() if self._engine is None else {self._engine._process.pid})

    def leftovers(self) -> set[int]:
        """Processes that carry our token."""
        return {int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _carries(p, self.token)}


def children(pid: int) -> list[int]:
    """The direct children of a process, zombies included."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = LONGEST_S) -> None:
    """Look again and again; fails when it does not come true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.005)


def _carries(process: Path, token: str) -> bool:
    try:
        return token.encode() in (process / "environ").read_bytes()
    except OSError:
        return False


def _tail(folder: Path) -> str:
    files = [*sorted((folder / "logs").glob("*.log")), folder / "trace.jsonl"]
    return "\n".join(f"--- {f.name}\n{f.read_text()[-1500:]}" for f in files if f.exists())
