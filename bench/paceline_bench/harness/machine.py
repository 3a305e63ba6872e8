"""The machine a figure comes from, and what its memory can do at best.

The limit of an exchange is the bytes that must cross the memory bus at least once, over the rate at which
this machine copies, and the system calls and wake-ups without which no message gets from one process to
another and back; all measured in the same run. How far above it we are says more than any time does.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time

import msgspec

_WORD = bytes(64)
_ECHO = """
import socket, sys
end = socket.socket(fileno=int(sys.argv[1]))
while word := end.recv(64):
    end.send(word)
"""
VERSIONS = ("paceline", "torch", "numpy", "msgspec", "ray")


class Machine(msgspec.Struct, frozen=True):
    """Hardware and versions."""

    cpu: str
    cores: int
    memory_gb: float
    system: str
    load: float
    """Processes that wanted to run, averaged over the minute before."""
    versions: dict[str, str]
    bandwidth: dict[str, float]
    """Bytes per second that a copy moves (read and written), by size of the copy."""


class OthersWork:
    """How much of this machine's processors others use, from when it is made on.

    Others are all but this process and its descendants; a hypervisor that takes a processor away is one.
    """

    def __init__(self) -> None:
        self._began = time.monotonic(), _busy_ticks(), _own_ticks()

    def share(self) -> float | None:
        """Of all processors' time; None where it cannot be known."""
        began, busy, own = self._began
        now = _busy_ticks()
        if busy is None or now is None:
            return None
        room = (time.monotonic() - began) * (os.cpu_count() or 1) * os.sysconf("SC_CLK_TCK")
        return min(1.0, max(0.0, now - busy - (_own_ticks() - own)) / max(room, 1.0))


def _busy_ticks() -> int | None:
    """How long all processors have worked for somebody so far; what was stolen from them as well."""
    try:
        with open("/proc/stat") as file:
            fields = [int(field) for field in file.readline().split()[1:]]
    except (OSError, ValueError):
        return None
    return sum(fields[:3]) + sum(fields[7:8])  # user, nice, system; stolen


def _own_ticks() -> int:
    """The part of this process and its descendants, with those that have ended and were waited for."""
    parents, ticks = {}, {}
    for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
        if entry.name.isdigit() and (fields := _stat(entry.name)):
            pid = int(entry.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(int(field) for field in fields[11:15])
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(ticks.get(pid, 0) for pid in mine)


def _stat(pid: str) -> list[str]:
    """What the kernel tells of a process, from its state on; nothing if it has just ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def look_around(bandwidth: dict[str, float]) -> Machine:
    """Describe this machine."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return Machine(
        _cpu(), os.cpu_count() or 1, pages / 2**30, system, os.getloadavg()[0], _versions(), bandwidth
    )


def copy_bandwidth(size_bytes: int, repeats: int = 7) -> float:
    """Bytes per second that this machine moves at best when it copies that much: read plus written."""
    import torch

    source = torch.ones(size_bytes // 4)
    target = torch.empty_like(source)
    before, best = torch.get_num_threads(), float("inf")
    for threads in {1, os.cpu_count() or 1}:
        torch.set_num_threads(threads)
        for _ in range(repeats):
            began = time.perf_counter()
            target.copy_(source)
            best = min(best, time.perf_counter() - began)
    torch.set_num_threads(before)
    return 2 * source.numel() * 4 / best


def memory_limit_s(size_bytes: int, passes: int, bytes_per_s: float) -> float:
    """The least time in which the model's size can cross the memory bus `passes` times."""
    return size_bytes * passes / bytes_per_s


def exchange_limit_s(size_bytes: int, passes: int, workers: int) -> float:
    """The least an exchange by all workers takes: memory, one word there and back, and for each further
    worker the calls of the process that answers them all."""
    memory_s = memory_limit_s(size_bytes, passes, copy_bandwidth(size_bytes))
    return memory_s + round_trip_s() + (workers - 1) * calls_s()


def round_trip_s(rounds: int = 300) -> float:
    """A word to another process that sleeps, and its answer, at best."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", _ECHO, str(theirs.fileno())]
    with mine, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as other:
        theirs.close()
        best = min(_timed_s(mine, mine) for _ in range(rounds))
        mine.close()
        other.wait()
    return best


def calls_s(rounds: int = 300) -> float:
    """A message sent and one received, without anybody to wake, at best."""
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, two:
        return min(_timed_s(one, two) for _ in range(rounds))


def _timed_s(sends: socket.socket, receives: socket.socket) -> float:
    began = time.perf_counter()
    sends.send(_WORD)
    receives.recv(len(_WORD))
    return time.perf_counter() - began


def update_passes(optimizer: str) -> int:
    """Times the weights' size crosses memory in one update, gradients aside: weights and state, both ways."""
    return {"sgd": 2, "adamw": 6}[optimizer]


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, platform.processor())
    except OSError:
        return platform.processor()


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
