"""The conductor of a run on a mesh: a process that holds no weights, hears of all workers, keeps the books.

Workers exchange tensors among themselves. What they need somebody for is to meet, to stop or save before the
same iteration, to put the parts of a checkpoint together, and to end when one of them is lost: a group that
misses one exchanges nothing any more. So a loss ends the run, at once, with rank and place named.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from safetensors import SafetensorError

from paceline.config import RunConfig
from paceline.errors import RunError
from paceline.fabric.channel import Channel
from paceline.fabric.presence import Allowance
from paceline.fabric.stop_signals import why_stopped
from paceline.fabric.watcher import Watcher
from paceline.parallel import messages as m
from paceline.parallel.conductor.books import MeshBooks
from paceline.parallel.parts import PARTS, read_parts
from paceline.parallel.signs import Action, Signs
from paceline.protocols.grid import Grid
from paceline.runtime.checkpoints.writer import CheckpointWriter
from paceline.runtime.messages.workers import Failed, Hello
from paceline.store.disk.checkpoint import Snapshot, remove_checkpoint, save_weights, write_checkpoint
from paceline.store.disk.reserve import not_saved

LOOK_S = 0.05
GRACE_S = 0.25
"""How long to listen for who was lost: its neighbours say that something broke off, and may be faster."""
LAST_S = 1.0
"""How long workers that were told to end may take before they are killed."""


class MeshWorker:
    """A worker, as the conductor knows it."""

    def __init__(self, rank: int, channel: Channel, pid: int) -> None:
        self.rank, self.channel, self.pid = rank, channel, pid
        self.over = False
        """Whether its script has ended in good order."""
        self.gone = False
        """Whether its process has."""
        self.saved: m.PartSaved | None = None
        """What it said of its part of the checkpoint that all wait for."""


class Trouble(msgspec.Struct, frozen=True, order=True):
    """Why a run cannot go on; the smallest is what it is put down to."""

    weight: int
    """0: a worker died; 1: its script failed; 2: an exchange broke off."""
    at_s: float
    rank: int
    text: str
    mistake: bool = False


class Conductor:
    """One per run."""

    def __init__(
        self,
        config: RunConfig,
        workers: list[tuple[Channel, int]],
        stop: int | None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """`workers`: channel and process of each; `ranks`: whose they are, if not everybody is there."""
        assert config.mesh is not None
        self.config, self._grid = config, Grid(config.mesh)
        self._meeting = os.memfd_create("paceline-mesh", os.MFD_CLOEXEC)
        self._signs = Signs.create(config.workers)
        self._workers = {
            c.fileno(): MeshWorker(rank, c, pid)
            for rank, (c, pid) in zip(ranks or range(len(workers)), workers, strict=True)
        }
        self._watcher = Watcher()
        self.books = MeshBooks(config, self._grid)
        self._keeping = CheckpointWriter(config, self.books.trace, self.books.now)
        self._parts, self._taken = config.path / PARTS, config.path / f"{PARTS}.taken"
        self._troubles: list[Trouble] = []
        self._decides: Allowance | None = None
        """How long to listen before it is decided who was lost."""
        self._ending, self._why = False, ""
        self._calls: list[Action] = []
        """What is to be called for, one after another."""
        self._saving = False
        """Whether a checkpoint is called for, and not all parts of it are there."""
        self._epoll = select.epoll()
        self._epoll.register(self._watcher.fileno(), select.EPOLLIN)
        self._stop = stop
        if stop is not None:
            self._epoll.register(stop, select.EPOLLIN)
        for fd, worker in self._workers.items():
            self._epoll.register(fd, select.EPOLLIN)
            self._watcher.watch(worker.pid)

    def greet(self, hello: Hello) -> None:
        """A worker's first word was heard before it was known whose it is."""
        self._welcome(next(p for p in self._workers.values() if p.rank == hello.rank), hello)

    def give_up(self, rank: int, why: str) -> None:
        """Somebody is missing who never came."""
        self._trouble(1, rank, why)

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> int:
        """Until all workers are gone."""
        try:
            while not all(worker.gone for worker in self._workers.values()):
                for fd, _ in self._epoll.poll(LOOK_S):
                    self._hear(fd)
                self._look()
            self._conclude()
        finally:
            self.books.close()
            self._watcher.close()
        return 0

    def _hear(self, fd: int) -> None:
        if fd == self._watcher.fileno():
            for pid in self._watcher.take():
                self._died(pid)
        elif fd == self._stop:
            self._epoll.unregister(fd)
            self._why = why_stopped(fd)
            self._calls.append(Action.STOP)
        elif not self._workers[fd].gone:
            worker = self._workers[fd]
            try:
                received = worker.channel.receive(m.conductor_decoder)
            except RunError as error:
                self._trouble(1, worker.rank, str(error))
                received = None
            if received is None:
                self._hung_up(fd, worker)
            else:
                self._take(worker, received[0])

    def _look(self) -> None:
        """What does not wait for a message."""
        now = time.monotonic()
        self.books.flush(now)
        if self._decides is not None:
            if self._decides.over:
                self._end_all()
            return
        if self._keeping.due(self.books.version) and not self._saving:
            self._saving = True
            self._calls.append(Action.SAVE)
        self._keeping.tell()
        if self._calls and self._signs.called is Action.NONE:
            self._signs.call(self._calls.pop(0))

    # -- what workers say ---------------------------------------------------------------------

    def _take(self, worker: MeshWorker, message: m.FromWorker) -> None:
        match message:
            case Hello():
                self._welcome(worker, message)
            case m.PartSaved():
                self._saved(worker, message)
            case m.EndWork():
                self._end_work(worker, message)
            case Failed():
                self._trouble(1, worker.rank, message.text, message.kind == "config")
            case m.ExchangeTorn():
                self._trouble(2, worker.rank, message.text)
            case m.Bye():
                worker.over = True
                self.books.resumable &= message.resumable
                self.books.passes[worker.rank] = message.passes
                self.books.samples_due = message.samples_due
                self.books.left(worker.rank, "stopped" if message.stopped else "finished")
            case _:
                self.books.take(worker.rank, message)

    def _end_work(self, worker: MeshWorker, message: m.EndWork) -> None:
        """Once: all workers may have found the same reason."""
        if not self._ending:
            self._ending = True
            self.books.end_work(worker.rank, message.why)
            self._calls.append(Action.END)

    def _welcome(self, worker: MeshWorker, hello: Hello) -> None:
        self.books.joined(worker.rank, hello)
        with suppress(OSError):  # it may be gone again; that is noticed elsewhere
            worker.channel.send(m.MeshWelcome(), (self._meeting, self._signs.fd))

    def _saved(self, worker: MeshWorker, message: m.PartSaved) -> None:
        """When the last part is on the disk, all go on, and the checkpoint is put together meanwhile."""
        worker.saved = message
        told = [each.saved for each in self._workers.values() if each.saved is not None]
        if len(told) < len(self._workers):
            return
        self._signs.clear()
        self._saving = False
        whole = max(told, key=lambda each: each.updates)  # some hold no part, and know nothing of it
        self._keeping.keep(whole.updates, whole.samples, self._take_parts)
        for each in self._workers.values():
            each.saved = None
            with suppress(OSError):
                each.channel.send(m.GoOn())

    def _take_parts(self) -> Callable[[], Snapshot]:
        """Out of the way of workers, who may write their next ones while these are read."""
        shutil.rmtree(self._taken, ignore_errors=True)
        os.replace(self._parts, self._taken)
        return lambda: read_parts(self._taken)

    def _remove_parts(self) -> None:
        for folder in (self._parts, self._taken):
            shutil.rmtree(folder, ignore_errors=True)

    # -- losses -------------------------------------------------------------------------------

    def _died(self, pid: int) -> None:
        for fd, worker in self._workers.items():
            if worker.pid == pid and not worker.gone:
                self._drain(worker)
                self._hung_up(fd, worker)

    def _drain(self, worker: MeshWorker) -> None:
        """What a process said before it ended still counts."""
        while worker.channel.wait(0.0):
            try:
                received = worker.channel.receive(m.conductor_decoder)
            except RunError:
                return
            if received is None:
                return
            self._take(worker, received[0])

    def _hung_up(self, fd: int, worker: MeshWorker) -> None:
        if worker.gone:
            return
        worker.gone = True
        self._epoll.unregister(fd)
        worker.channel.close()
        if not worker.over and not any(trouble.rank == worker.rank for trouble in self._troubles):
            self._trouble(0, worker.rank, "")

    def _trouble(self, weight: int, rank: int, text: str, mistake: bool = False) -> None:
        self._troubles.append(Trouble(weight, time.monotonic(), rank, text, mistake))
        if self._decides is None:
            self._decides = Allowance(0.0 if weight == 0 else GRACE_S)

    def _end_all(self) -> None:
        """Tell all who are left to end, and see to it that they do."""
        left = [worker for worker in self._workers.values() if not worker.gone]
        for worker in left:
            with suppress(OSError):
                worker.channel.send(m.EndRun(min(self._troubles).rank))
        last = Allowance(LAST_S)
        while left and not last.over:
            time.sleep(0.005)
            left = [worker for worker in left if _lives(worker.pid)]
        for worker in left:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        for worker in self._workers.values():
            worker.gone = True

    # -- the end ------------------------------------------------------------------------------

    def _conclude(self) -> None:
        self.books.flush(None)
        if self._troubles:
            self._put_down()
            return
        self._keeping.tell(wait=True)
        stopped = self.books.stopped
        whole = read_parts(self._parts) if self._parts.is_dir() else None
        undone = [] if whole is None else self._save(whole, stopped)
        self._remove_parts()
        if not (stopped or self._ending):
            self.books.mention_undone()
        status, why = ("stopped", self._why) if stopped else ("finished", "")
        if undone:
            status, why = "failed", ". ".join([why or "trained to the end", *undone])
        self.books.end(status, why)

    def _save(self, whole: Snapshot, stopped: bool) -> list[str]:
        """The weights, and a checkpoint if the run is to go on from there. What could not be written."""
        run, keep, warn = self.config.path, self.config.keep, self.books.warn
        undone = []
        try:
            save_weights(run / "weights.safetensors", whole.model, warn)
        except (OSError, SafetensorError) as error:
            undone.append(not_saved("the weights", error, run))
        try:
            if stopped and self.books.resumable:
                write_checkpoint(run / "checkpoint", whole, keep, warn)
        except (OSError, SafetensorError) as error:
            undone.append(not_saved("the checkpoint", error, run))
        if not stopped and not undone:
            remove_checkpoint(run / "checkpoint")
        return undone

    def _put_down(self) -> None:
        """Say who was lost, first of all, and what became of the others."""
        first = min(self._troubles)
        name = self._grid.name(first.rank)
        words = {0: "died", 1: f"failed: {first.text}", 2: f"lost another worker: {first.text}"}
        detail = self._mistake(first) if first.mistake else f"{name} {words[first.weight]}"
        heard = "" if first.mistake else first.text  # the last word has it
        for worker in sorted(self._workers.values(), key=lambda each: each.rank):
            if worker.rank == first.rank:
                self.books.left(worker.rank, "died" if first.weight == 0 else "failed", heard)
            elif not worker.over:
                self.books.left(worker.rank, "stopped")
        self._keeping.tell(wait=True)
        self._remove_parts()
        alone = ", and the other parts of a split model cannot go on without it" if first.weight == 0 else ""
        self.books.end("failed", detail + alone, mistake=first.mistake)

    def _mistake(self, first: Trouble) -> str:
        """With its place, unless several made the same."""
        alone = sum(each.text == first.text for each in self._troubles) == 1
        return f"{self._grid.name(first.rank)}: {first.text}" if alone else first.text


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def conduct_mesh(config: RunConfig, workers: list[tuple[Channel, int]], stop: int | None) -> int:
    """The conductor's process: from the first worker to the last line of the trace."""
    return Conductor(config, workers, stop).run()
