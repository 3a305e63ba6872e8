"""Deaths are noticed, whoever died, and even if it was before anybody looked."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from paceline.fabric.watcher import Watcher

PATIENCE_S = 20.0


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    watcher = Watcher()
    yield watcher
    watcher.close()


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def dead(watcher: Watcher, number: int) -> set[int]:
    """Wait until so many deaths have been told."""
    found: set[int] = set()
    while len(found) < number:
        ready, _, _ = select.select([watcher.fileno()], [], [], PATIENCE_S)
        assert ready, "a death was not noticed"
        found.update(watcher.take())
    return found


def quiet(watcher: Watcher) -> bool:
    ready, _, _ = select.select([watcher.fileno()], [], [], 0.3)
    return not ready


def test_a_killed_process_is_told_and_no_other(
    watcher: Watcher, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    """Even before anybody has waited for it: it is a zombie then."""
    for process in sleepers:
        watcher.watch(process.pid)
    assert quiet(watcher)
    sleepers[1].kill()
    assert dead(watcher, 1) == {sleepers[1].pid}
    assert quiet(watcher)
    for process in (sleepers[0], sleepers[2]):
        process.send_signal(signal.SIGTERM)
    assert dead(watcher, 2) == {sleepers[0].pid, sleepers[2].pid}


def test_a_stopped_process_is_not_dead(watcher: Watcher, sleepers: list[subprocess.Popen[bytes]]) -> None:
    watcher.watch(sleepers[0].pid)
    sleepers[0].send_signal(signal.SIGSTOP)
    assert quiet(watcher)


def test_a_process_that_is_gone_already_is_told(watcher: Watcher) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    watcher.watch(process.pid)
    assert dead(watcher, 1) == {process.pid}


def test_without_pidfds_deaths_are_seen_by_looking(
    watcher: Watcher, sleepers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int) -> int:
        raise OSError("no such system call")

    monkeypatch.setattr(os, "pidfd_open", refused)
    watcher.watch(sleepers[0].pid)
    sleepers[0].kill()
    assert dead(watcher, 1) == {sleepers[0].pid}


def test_who_is_forgotten_is_not_told(watcher: Watcher, sleepers: list[subprocess.Popen[bytes]]) -> None:
    watcher.watch(sleepers[0].pid)
    watcher.forget(sleepers[0].pid)
    watcher.forget(sleepers[0].pid)
    sleepers[0].kill()
    assert quiet(watcher)


def test_closing_ends_its_thread_and_closes_what_it_opened() -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    watcher = Watcher()
    watcher.watch(os.getpid())
    watcher.close()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
