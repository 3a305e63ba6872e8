"""Signals that ask a process to end, and what ties one process to another.

A machine that shuts down, systemd and `docker stop` send SIGTERM to every process of a run at once; a
terminal that closes sends SIGHUP. Only the launcher may end a run: stores and conductors (`heed_stop`) and
the starter of workers (engines/zygote.py) take any number of these signals for one request to save the run,
and a worker (`wait_for_word`) goes on until the store tells it to stop. A second signal to the launcher ends
all of them by SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator

ASKING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What asks for an end, besides Ctrl-C."""
PR_SET_PDEATHSIG = 1
ASKED, LEFT_ALONE = 1, 1 << 32
"""What is added to a run's stop counter: somebody asked for the end; whoever started the run is gone."""


def heeded() -> list[signal.Signals]:
    """Those of them that are not ignored here: `nohup` ignores SIGHUP, and means it."""
    return [number for number in ASKING if signal.getsignal(number) is not signal.SIG_IGN]


def answer(action: Callable[[], None]) -> None:
    """Do this when one of them comes. Processes that are forked from here take them as ever."""
    numbers = heeded()
    for number in numbers:
        signal.signal(number, lambda *_: action())
        signal.siginterrupt(number, False)  # libraries that read and write go on reading and writing
    _reset_in_forks(numbers)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """While a library is started that takes signals for itself: Spark takes Ctrl-C, Ray SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ASKING)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _reset_in_forks(numbers: list[signal.Signals]) -> None:
    """What comes before a new process has its own mind waits until it has."""

    def in_child() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, numbers),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers),
        after_in_child=in_child,
    )


def heed_stop(stop: int) -> None:
    """The signals make the event counter `stop` readable, also if our parent's death has sent them."""
    parent = os.getppid()
    answer(lambda: os.eventfd_write(stop, ASKED if os.getppid() == parent else LEFT_ALONE))


def why_stopped(stop: int) -> str:
    """Why a run was asked to end; the counter stays readable."""
    count = os.eventfd_read(stop)
    os.eventfd_write(stop, count)
    if count < LEFT_ALONE:
        return "interrupted"
    return "interrupted: the process that started the run is gone"


def wait_for_word() -> None:
    """A worker whose run somebody else ends: it lives on until it is told to stop, and has saved its part."""
    answer(lambda: None)


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when our parent dies, whatever it dies of."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before we said that
        os._exit(1)


def outlive_parent() -> None:
    """Take `die_with` back."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, 0)
