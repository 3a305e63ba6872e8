"""A process that was stopped itself knows it, and gives everybody a fresh allowance."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from paceline.fabric.door import Door
from paceline.fabric.session import Session
from support.ports import free_port
from support.sessions import SECRET, Notebook

STOPPED_S = 2.5
pytestmark = pytest.mark.timeout(60)

WAITS = """
import os, sys, time
from paceline.fabric.presence import Allowance
Allowance(1.0)
if sys.argv[1] == "forked" and os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
allowance = Allowance(float(sys.argv[2]))
until = time.monotonic() + 2.0
print(os.getpid(), flush=True)
while time.monotonic() < until and not allowance.over:
    time.sleep(0.01)
print(allowance.over, flush=True)
"""

CALLS = """
import threading, sys
from paceline.fabric.door import Enter, call_patiently
print("calls", flush=True)
call_patiently(("127.0.0.1", int(sys.argv[1])), sys.argv[2].encode(), Enter("s", "h"), 1.5, threading.Event())
print("in", flush=True)
"""


def started(code: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop_for_a_while(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("how", ["plain", "forked"])
def test_a_limit_begins_anew_when_this_process_was_stopped_meanwhile(how: str) -> None:
    with started(WAITS, how, 2.2) as process:
        assert process.stdout is not None
        stop_for_a_while(int(process.stdout.readline()))
        assert process.stdout.read().split() == ["False"]


def test_a_limit_comes_to_its_end_for_who_was_there_all_the_while() -> None:
    with started(WAITS, "plain", 0.1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.read().split() == ["True"]


def test_who_was_stopped_does_not_take_the_store_for_dead() -> None:
    """Its patience is over when it goes on, and the store is there a moment later."""
    port = free_port()
    with started(CALLS, port, SECRET.decode()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "calls\n"
        time.sleep(0.5)  # it has called in vain by then
        stop_for_a_while(process.pid)
        time.sleep(0.3)
        session = Session(Notebook(8), lambda why, closed: None)
        door = Door(("127.0.0.1", port), SECRET, lambda asked: (session, b""))
        out, errors = process.communicate(timeout=30)
        session.close()
        door.close()
    assert out == "in\n", errors
