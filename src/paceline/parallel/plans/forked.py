"""Ranks that one process forks once it has torch imported: each of them would take seconds for that alone.

A forked rank holds pages of torch that it shares, so its memory is not that of its tensors: whoever measures
memory starts processes of their own."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.fabric.stop_signals import die_with


class RankProcesses:
    """The process that forks, and what it tells of the ranks: a line for each that has ended."""

    def __init__(self, words: Sequence[str], count: int, logs: Path, environment: dict[str, str]) -> None:
        self.statuses: dict[int, int] = {}
        self._count, self._unread = count, b""
        self._pipe, end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        command = [sys.executable, "-P", "-m", __name__, *words, str(logs), str(end), str(os.getpid())]
        with (logs / "rank0.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, pass_fds=(end,)
            )
        os.close(end)

    def poll(self) -> None:
        """Read what there is. All have ended when nobody holds the other end any more."""
        try:
            while data := os.read(self._pipe, 4096):
                self._unread += data
        except BlockingIOError:
            pass
        else:
            unknown = self._process.wait() or -signal.SIGKILL
            self.statuses = dict.fromkeys(range(self._count), unknown) | self.statuses
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            rank, status = line.split()
            self.statuses[int(rank)] = int(status)

    def kill(self) -> None:
        """Kill all; afterwards none is left."""
        self._process.kill()
        os.set_blocking(self._pipe, True)
        self.poll()

    def close(self) -> None:
        """When all have ended: so does the process that forked them."""
        self._process.wait()
        os.close(self._pipe)


class ForkedRank:
    """One of them, as far as `run_ranks` needs a process."""

    def __init__(self, processes: RankProcesses, rank: int) -> None:
        self._processes, self._rank = processes, rank

    @property
    def returncode(self) -> int | None:
        """As of a process; None: it has not ended."""
        return self._processes.statuses.get(self._rank)

    def poll(self) -> int | None:
        """The same, looked at anew."""
        if self.returncode is None:
            self._processes.poll()
        return self.returncode

    def kill(self) -> None:
        """End it, and all others: none goes on without it."""
        if self.returncode is None:
            self._processes.kill()

    def wait(self) -> int | None:
        """It was killed before, so it has ended."""
        return self.returncode


def main() -> None:
    """Import torch and the task, fork the ranks, tell how each ended."""
    task, size, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[5])
    folder, logs = map(Path, sys.argv[3:5])
    die_with(int(sys.argv[6]))
    _warm_up(task)
    running = {_fork(task, rank, size, folder, logs): rank for rank in range(size)}
    while running:
        pid, status = os.wait()
        os.write(end, f"{running.pop(pid)} {os.waitstatus_to_exitcode(status)}\n".encode())


def _warm_up(task: str) -> None:
    """All that a rank would import; the first optimizer imports the rest of torch. No thread is started."""
    importlib.import_module(task.partition(":")[0])
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()
    gc.collect()
    gc.freeze()


def _fork(task: str, rank: int, size: int, folder: Path, logs: Path) -> int:
    """A child that is one rank, with its output in its log, and never returns."""
    from paceline.parallel.plans import rank as one

    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        die_with(parent)
        log = os.open(logs / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        one.carry_out(task, rank, size, folder)
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
