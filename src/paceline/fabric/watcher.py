"""Notices dead workers fast, even while the store is busy with an update.

Three signs, since each alone is late or missing at times: the pidfd becomes readable; the socket
ends (but a forked DataLoader worker may keep it open); and the process is marked as exiting, which
shows long before a process with gigabytes of memory has really gone. A thread of its own sleeps in
epoll and looks at the third sign twenty times a second; it wakes the store's loop through an eventfd.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque

PF_EXITING = 0x4
LOOK_S = 0.05


class Watcher:
    """Watches processes; `fileno()` becomes readable when one died, `take()` says which."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._halt = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._halt, select.EPOLLIN)
        self._watched: dict[int, int | None] = {}
        self._dead: deque[int] = deque()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="paceline-watcher", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For the store's epoll."""
        return self._wake

    def watch(self, pid: int) -> None:
        """Begin to watch a process. One that is gone already is reported at once."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._report(pid)
            return
        except OSError:
            pidfd = None
        with self._lock:
            self._watched[pid] = pidfd
        if pidfd is not None:
            self._epoll.register(pidfd, select.EPOLLIN)

    def forget(self, pid: int) -> None:
        """Stop watching."""
        with self._lock:
            pidfd = self._watched.pop(pid, None)
        if pidfd is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(pidfd)
            os.close(pidfd)

    @property
    def noticed(self) -> bool:
        """Whether somebody died whom `take` has not told yet."""
        return bool(self._dead)

    def take(self) -> list[int]:
        """The processes that died since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        dead = []
        while self._dead:
            dead.append(self._dead.popleft())
        return dead

    def close(self) -> None:
        """End the thread."""
        os.eventfd_write(self._halt, 1)
        self._thread.join()
        for pid in list(self._watched):
            self.forget(pid)
        self._epoll.close()
        os.close(self._wake)
        os.close(self._halt)

    def _run(self) -> None:
        while True:
            ready = {fd for fd, _ in self._epoll.poll(LOOK_S)}
            if self._halt in ready:
                return
            with self._lock:
                watched = list(self._watched.items())
            for pid, pidfd in watched:
                if pidfd in ready or _is_exiting(pid):
                    self.forget(pid)
                    self._report(pid)

    def _report(self, pid: int) -> None:
        self._dead.append(pid)
        os.eventfd_write(self._wake, 1)


def _is_exiting(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return True
    return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & PF_EXITING)
