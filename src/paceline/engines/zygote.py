"""A process that has torch imported and does nothing but fork: workers start in milliseconds.

Importing torch in five processes on two cores takes seconds; forking them from a parent that has
it takes none. The zygote starts no thread and runs no backward pass, so that forking stays safe.
If its launcher dies it has the run saved, and ends when all processes of the run have. Its children die
with it (the store saves the run first): nothing is ever left behind.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from paceline.engines import control as c
from paceline.engines.output import print_to
from paceline.errors import PacelineError
from paceline.fabric.channel import Channel
from paceline.fabric.stop_signals import (
    ASKED,
    ASKING,
    LEFT_ALONE,
    die_with,
    heed_stop,
    heeded,
    outlive_parent,
    wait_for_word,
)
from paceline.store.disk.folders import go_on
from paceline.trace.life import write_result

WARM = ("numpy", "scipy", "sklearn.datasets", "pandas", "torchvision", "transformers")
"""Heavy modules imported before forking, if the script imports them and they are installed."""


class RunProcesses:
    """The processes of one run."""

    def __init__(self, order: c.Launch) -> None:
        config = self.config = order.config
        self._order = order
        self.stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.workers: dict[int, int] = {}
        self.store: int | None = None
        self.statuses: dict[int, int] = {}
        self.store_status = 0
        (config.path / "logs").mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Fork the workers, and what stands between them: the owner of the store, or the host's relay."""
        config, guest = self.config, self._order.guest
        if config.workers == 1 and config.cluster is None and config.listen is None and guest is None:
            self.workers[_fork(lambda: self._worker(0, 0, None), self._log("rank0"))] = 0
            return
        ranks = range(config.near) if guest is None else guest.ranks
        pairs = [Channel.pair() for _ in ranks]
        for place, rank in enumerate(ranks):
            self.workers[_fork(partial(self._worker, rank, place, pairs), self._log(f"rank{rank}"))] = rank
        pids = tuple(self.workers)
        log = self._log("store" if guest is None else "relay")
        self.store = _fork(lambda: self._owner(pairs, pids), log, signal.SIGTERM)
        for pair in pairs:
            pair[0].close()
            pair[1].close()

    def stop(self, why: int = ASKED) -> None:
        """Ask the run to save itself and to end."""
        os.eventfd_write(self.stop_fd, why)
        if self.store is None:
            for pid in self.workers:
                os.kill(pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        left = [*self.workers, *([] if self.store is None else [self.store])]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in left:
            os.waitpid(pid, 0)

    def write_epitaph(self) -> None:
        """The launcher is gone, and the run is over: leave its result, and say in its log how to go on."""
        with contextlib.suppress(PacelineError, OSError):
            if self._order.guest is None:
                write_result(self.config.path)
        part, how = "run", go_on(self.config)
        if self._order.guest is not None:
            part, how, name = "host's part of the run", "", "relay"
        else:
            name = "rank0" if self.config.workers == 1 else "store"
        with contextlib.suppress(OSError), self._log(name).open("a") as log:
            log.write(f"The command that started this {part} is gone, so it was stopped.{how}\n")

    def reap(self) -> bool:
        """Take note of processes that ended; whether all have."""
        while self.workers or self.store is not None:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return False
            code = os.waitstatus_to_exitcode(status)
            if pid == self.store:
                self.store, self.store_status = None, code
            elif pid in self.workers:
                self.statuses[self.workers.pop(pid)] = code
        os.close(self.stop_fd)
        return True

    def _log(self, name: str) -> Path:
        return self.config.path / "logs" / f"{name}.log"

    def _worker(self, rank: int, place: int, pairs: list[tuple[socket.socket, socket.socket]] | None) -> int:
        from paceline.runtime.script import run_script
        from paceline.runtime.seat import Seat

        channel = None
        for other, (mine, theirs) in enumerate(pairs or []):
            theirs.close()
            if other == place:
                channel = Channel(mine)
            else:
                mine.close()
        if channel is not None:
            wait_for_word()
        else:  # it is alone: it saves itself once there is something to save, and ends until then
            for number in heeded():
                signal.signal(number, signal.SIG_DFL)
        here = len(pairs or [()])
        threads = max(1, (os.cpu_count() or 1) // max(1, here))
        return run_script(Seat(rank, self.config, channel, local=(place, here)), threads)

    def _owner(self, pairs: list[tuple[socket.socket, socket.socket]], pids: tuple[int, ...]) -> int:
        from paceline.runtime.serve import host, serve

        heed_stop(self.stop_fd)
        for mine, _ in pairs:
            mine.close()
        workers = [(Channel(end), pid) for (_, end), pid in zip(pairs, pids, strict=True)]
        if self.config.mesh is not None:
            from paceline.parallel.conductor.conducting import conduct_mesh

            return conduct_mesh(self.config, workers, self.stop_fd)
        guest = self._order.guest
        if guest is not None:
            secret, door = self._order.secret, None
            if self.config.store_hosts > 1:
                door = guest.listen, guest.reach
            return host(guest.address, secret, guest.session, workers, self.stop_fd, guest.trust, door)
        return serve(self.config, workers, self.stop_fd, self._order.secret)


def main() -> None:
    """Serve the launcher whose process and socket are named on the command line."""
    launcher, fd, *wanted = sys.argv[1:]
    die_with(int(launcher))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGCHLD, *heeded()):
        signal.signal(number, lambda *_: None)  # heard through the pipe below
    channel = Channel(socket.socket(fileno=int(fd)))
    _warm_up(wanted)
    wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    outlive_parent()  # from now on the end of its connection tells
    Attendance(channel, wakeup_read).see_through()


class Attendance:
    """Does what the launcher says until it hangs up. If that was not in good order, the run is saved."""

    def __init__(self, channel: Channel, wakeup: int) -> None:
        self._channel, self._wakeup = channel, wakeup
        self._running: RunProcesses | None = None
        self._there = True
        """Whether the launcher is."""

    def see_through(self) -> None:
        """Until there is nothing left to attend to."""
        while self._there or self._running is not None:
            heard = [self._channel.fileno()] if self._there else []
            ready, _, _ = select.select([*heard, self._wakeup], [], [])
            asked = self._wakeup in ready and bool({*os.read(self._wakeup, 4096)} & {*ASKING})
            if asked and self._running is not None:
                self._running.stop()
            self._reap()
            if self._there and self._channel.fileno() in ready:
                self._hear()

    def _reap(self) -> None:
        running = self._running
        if running is None or not running.reap():
            return
        self._running = None
        if self._there:
            self._say(c.Ended(running.statuses, running.store_status))
        else:
            running.write_epitaph()

    def _hear(self) -> None:
        received = None
        with contextlib.suppress(ConnectionResetError):
            received = self._channel.receive(c.zygote_decoder)
        message, running = None if received is None else received[0], self._running
        if isinstance(message, c.Launch):
            running = self._running = RunProcesses(message)
            running.start()
            self._say(c.Started(tuple(running.workers)))
        elif isinstance(message, c.Quit):
            self._there, self._running = False, None
            if running is not None:
                running.kill()
        elif running is not None:
            running.stop(ASKED if message else LEFT_ALONE)
        self._there &= message is not None

    def _say(self, message: c.FromZygote) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone: heard soon
            self._channel.send(message)


def _fork(body: Callable[[], int], log: Path, by: signal.Signals = signal.SIGKILL) -> int:
    """A child that runs `body` with its output in `log`, and never returns. `by`: what it gets if we die."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        die_with(parent, by)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _redirect(log)
        status = body()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _redirect(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    print_to(1, 2)


def _warm_up(wanted: list[str]) -> None:
    """Import what workers will need, and make one optimizer: that imports the rest of torch."""
    import torch

    for name in wanted:
        if name in WARM:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    importlib.import_module(name)
                except Exception:  # the script says so itself, in its log
                    continue
    importlib.import_module("paceline.runtime.script")
    importlib.import_module("paceline.runtime.serve")
    importlib.import_module("paceline.parallel.joining")
    importlib.import_module("paceline.parallel.conductor.conducting")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
