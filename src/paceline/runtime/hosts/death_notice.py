"""Tells the store at once that a host's relay has died, which its broken connection alone does not say.

A connection that ends or is reset may be back in a moment, so the store waits for it, and all who wait for
this host's workers wait with it. A process beside the relay, which sleeps until the relay is gone, knows
better. Whoever runs a relay runs it inside of a `DeathNotice`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import TracebackType

import msgspec

from paceline.errors import PacelineError
from paceline.fabric.door import Enter, call_patiently
from paceline.fabric.tls import Trust

PATIENCE_S = 5.0
"""How long to try to reach the store."""
STANDARD = 3
"""Descriptors of standard input, output and errors."""


class DeathNotice:
    """Made before the process that may die has threads, or connections that only its death closes."""

    def __init__(self, address: tuple[str, int], secret: bytes, hello: Enter, trust: Trust | None) -> None:
        asleep, self._alive = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid:
            os.close(asleep)
            return
        status = 1
        try:
            _hold_only(asleep)
            if not os.read(asleep, 1):
                tell_ended(address, secret, hello, trust)
            status = 0
        finally:
            os._exit(status)

    def __enter__(self) -> DeathNotice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """All went well, so there is nothing to tell; or it did not, and that is told."""
        if error is None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._alive, b"!")
        os.close(self._alive)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _hold_only(fd: int) -> None:
    """Nothing else may stay open here: others wait for the end of what the relay holds."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(STANDARD):
        os.dup2(null, standard)
    for other in map(int, os.listdir("/proc/self/fd")):
        if other >= STANDARD and other != fd:
            with contextlib.suppress(OSError):
                os.close(other)


def tell_ended(address: tuple[str, int], secret: bytes, hello: Enter, trust: Trust | None) -> None:
    """Tell the store that this session is over, if it can be reached soon."""
    ended = msgspec.structs.replace(hello, ended=True)
    with contextlib.suppress(OSError, PacelineError):
        call_patiently(address, secret, ended, PATIENCE_S, threading.Event(), trust)
