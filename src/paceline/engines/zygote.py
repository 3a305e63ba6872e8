"""A process that has torch imported and does nothing but fork: workers start in milliseconds.

Importing torch in five processes on two cores takes seconds; forking them from a parent that has
it takes none. The zygote starts no thread and runs no backward pass, so that forking stays safe.
It dies with its launcher, and its children die with it: nothing is ever left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from paceline.fabric.channel import Channel

PR_SET_PDEATHSIG = 1
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
        self.store = _fork(lambda: self._owner(pairs, pids), self._log("store"))
        for pair in pairs:
            pair[0].close()
            pair[1].close()

    def stop(self) -> None:
        """Ask the run to end."""
        os.eventfd_write(self.stop_fd, 1)
        if self.store is None:
            for pid in self.workers:
                os.kill(pid, signal.SIGTERM)

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
        here = len(pairs or [()])
        threads = max(1, (os.cpu_count() or 1) // max(1, here))
        return run_script(Seat(rank, self.config, channel, local=(place, here)), threads)

    def _owner(self, pairs: list[tuple[socket.socket, socket.socket]], pids: tuple[int, ...]) -> int:
        from paceline.runtime.serve import host, serve

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
    channel = Channel(socket.socket(fileno=int(fd)))
    _warm_up(wanted)
    wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the launcher is gone, and so are we
        _attend(channel, wakeup_read)


def _attend(channel: Channel, wakeup_read: int) -> None:
    """Do what the launcher says until it hangs up."""
    running: RunProcesses | None = None
    while True:
        ready, _, _ = select.select([channel.fileno(), wakeup_read], [], [])
        if wakeup_read in ready:
            os.read(wakeup_read, 4096)
        if running is not None and running.reap():
            channel.send(c.Ended(running.statuses, running.store_status))
            running = None
        if channel.fileno() in ready:
            received = channel.receive(c.zygote_decoder)
            if received is None:
                return
            running = _obey(received[0], running, channel)


def _obey(message: c.ToZygote, running: RunProcesses | None, channel: Channel) -> RunProcesses | None:
    if isinstance(message, c.Launch):
        running = RunProcesses(message)
        running.start()
        channel.send(c.Started(tuple(running.workers)))
    elif running is not None:
        running.stop()
    return running


def _fork(body: Callable[[], int], log: Path) -> int:
    """A child that runs `body` with its output in `log`, and never returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with(parent)
        signal.set_wakeup_fd(-1)
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


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when our parent dies, whatever it dies of."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before we said that
        os._exit(1)


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
