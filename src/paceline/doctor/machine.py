"""This machine: cores, memory, shared memory, clock, loopback, its own name."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import time
from pathlib import Path

from paceline.doctor.findings import Finding

GIB = 1 << 30
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
_CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")


def check_machine() -> list[Finding]:
    """All of it; takes a fraction of a second."""
    return [
        check_cores(),
        check_load(),
        check_memory(),
        check_memfd(),
        check_dev_shm(),
        check_files(),
        check_clock(),
        check_loopback(),
        check_own_name(),
    ]


def check_cores() -> Finding:
    """Those this process may use."""
    cores = len(os.sched_getaffinity(0))
    if cores == 1:
        advice = (
            "Workers and store share one core: expect no speed-up. Give --device-time to compare protocols."
        )
        return Finding("cores", "warning", "1", advice)
    return Finding("cores", "ok", f"{cores} of {os.cpu_count()}")


def check_load() -> Finding:
    """Whether something else is running."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        return Finding("load", "warning", f"{load:.1f}", "Something else runs here: timings mean little now.")
    return Finding("load", "ok", f"{load:.1f}")


def check_memory() -> Finding:
    """What is free for models, gradients and copies."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    free, total = sizes["MemAvailable"], sizes["MemTotal"]
    seen = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < GIB:
        advice = "PyTorch alone takes some 0.3 GiB per worker. End other programs, or take fewer workers."
        return Finding("memory", "problem" if free < GIB / 2 else "warning", seen, advice)
    return Finding("memory", "ok", seen)


def check_memfd() -> Finding:
    """Anonymous shared memory, written through one mapping and read through another."""
    try:
        file = os.memfd_create("paceline-doctor")
        with os.fdopen(file, "r+b"):
            os.ftruncate(file, mmap.PAGESIZE)
            with mmap.mmap(file, mmap.PAGESIZE) as one, mmap.mmap(file, mmap.PAGESIZE) as other:
                one[:4] = b"pace"
                works = other[:4] == b"pace"
    except OSError as error:
        return Finding("shared memory", "problem", f"memfd: {error.strerror}", _MEMFD_ADVICE)
    return Finding("shared memory", "ok" if works else "problem", "memfd", "" if works else _MEMFD_ADVICE)


_MEMFD_ADVICE = (
    "Workers of one host cannot share weights. Allow memfd_create and mmap in the container's profile."
)


def check_dev_shm() -> Finding:
    """Not for Paceline, which needs no names: for PyTorch's own data loaders."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding(
            "/dev/shm", "warning", str(error.strerror), "PyTorch's data loaders need it. Mount it."
        )
    free = stat.f_bavail * stat.f_frsize
    seen = f"{free / GIB:.2f} GiB free"
    if free < GIB // 4:
        advice = "Data loaders with workers pass batches through it. In Docker: --shm-size=2g."
        return Finding("/dev/shm", "warning", seen, advice)
    return Finding("/dev/shm", "ok", seen)


def check_files() -> Finding:
    """Every worker takes several descriptors of the store."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return Finding("open files", "warning", str(soft), "Few for many workers. Raise it: ulimit -n 4096.")
    return Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else str(soft))


def check_clock() -> Finding:
    """Every step reads the clock, so reading it has to cost nothing."""
    source = _CLOCK.read_text().strip() if _CLOCK.exists() else "unknown"
    count, start = 20_000, time.perf_counter()
    for _ in range(count):
        time.perf_counter()
    nanoseconds = (time.perf_counter() - start) / count * 1e9
    seen = f"{source}, {nanoseconds:.0f} ns a reading"
    if source in SLOW_CLOCKS or nanoseconds > 2000:
        return Finding("clock", "warning", seen, "A slow clock slows every step. Boot with clocksource=tsc.")
    return Finding("clock", "ok", seen)


def check_loopback() -> Finding:
    """A port can be opened on loopback, and bytes come back."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5) as one,
            server.accept()[0] as other,
        ):
            one.sendall(b"pace")
            works = other.recv(4) == b"pace"
    except OSError as error:
        advice = "Bring it up (ip link set lo up), and let the firewall pass what stays on this host."
        return Finding("loopback", "problem", str(error.strerror or error), advice)
    return Finding(
        "loopback", "ok" if works else "problem", "127.0.0.1", "" if works else "Bytes went astray."
    )


def check_own_name() -> Finding:
    """Others are told to connect to whatever this host's name resolves to."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        advice = f"gloo, Ray and Spark look it up. Add a line 'ADDRESS {name}' to /etc/hosts."
        return Finding("own name", "warning", f"{name} does not resolve", advice)
    if address.startswith("127."):
        advice = f"Fine on one host. Before using others, put its real address into /etc/hosts, with {name}."
        return Finding("own name", "warning", f"{name} is {address}", advice)
    return Finding("own name", "ok", f"{name} is {address}")
