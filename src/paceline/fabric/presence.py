"""Knows when this process was not running itself, so that it blames nobody else for that.

A process may be stopped (SIGSTOP, Ctrl-Z, a frozen container), starved, or asleep with its machine. When it
goes on, all time limits are over, and what the others said meanwhile is unread. So whoever looks at how long
somebody has been silent counts from `counted_from`, or has an `Allowance`: a limit begins anew if this
process was away meanwhile. Owners, relays, conductors and launchers use it.

A thread ticks, and a tick that comes much too late means that the process was away. Whoever asks first
afterwards notices it, the thread or somebody else. No thread survives a fork: a child starts its own.
"""

from __future__ import annotations

import os
import threading
import time

TICK_S = 0.2
AWAY_S = 1.0
"""So much later than it should come, a tick is late because the process was away."""


class Presence:
    """Since when this process has been running without a break."""

    def __init__(self, tick_s: float = TICK_S) -> None:
        self._tick_s = tick_s
        self._lock = threading.Lock()
        self._ticked_s = time.monotonic()
        self._back_s = 0.0
        """When it came back last, on the monotonic clock."""
        threading.Thread(target=self._run, name="paceline-presence", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._tick_s)
            self._look()

    def _look(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._ticked_s > self._tick_s + AWAY_S:
                self._back_s = now
            self._ticked_s = now

    def back_s(self) -> float:
        """When it came back last; 0: it was never away."""
        self._look()
        return self._back_s


class _Mine:
    """This process's, made when it is first asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._presence: Presence | None = None

    def get(self) -> Presence:
        with self._lock:
            if self._presence is None:
                self._presence = Presence()
            return self._presence


_mine = _Mine()


def _anew() -> None:
    global _mine
    _mine = _Mine()


os.register_at_fork(after_in_child=_anew)


def counted_from(since_s: float) -> float:
    """When a wait that began at `since_s` (on the monotonic clock) counts from: not from before this process
    was away."""
    return max(since_s, _mine.get().back_s())


class Allowance:
    """How long somebody may take, from now on; all of it again if this process was away meanwhile."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since_s = time.monotonic()
        counted_from(self._since_s)  # from now on an absence is noticed

    @property
    def left_s(self) -> float:
        """What is left of it; less than 0: it is over since then."""
        return counted_from(self._since_s) + self.seconds - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self.left_s <= 0
