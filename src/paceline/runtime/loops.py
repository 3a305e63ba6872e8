"""Two clocks for one owner: the real loop sleeps until somebody speaks, the virtual one asks in order."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from paceline.errors import RunError
from paceline.fabric.channel import Channel
from paceline.fabric.watcher import Watcher
from paceline.runtime.member import Member
from paceline.runtime.messages import worker_decoder
from paceline.runtime.owner import Owner

FLUSH_S = 0.1
"""How long a trace event may stay unwritten."""
GRACE_S = 10.0
"""How long a worker may take to end by itself once the run is over."""


class RealLoop:
    """Single-threaded, asleep in epoll; a watcher thread tells of deaths."""

    def __init__(self, owner: Owner, workers: list[tuple[Channel, int]], stop: int | None = None) -> None:
        """Workers are channel and pid, by rank; `stop` becomes readable when the run is to end."""
        self._owner = owner
        self._watcher = Watcher()
        self._epoll = select.epoll()
        self._epoll.register(self._watcher.fileno(), select.EPOLLIN)
        self._stop = stop
        if stop is not None:
            self._epoll.register(stop, select.EPOLLIN)
        self._by_fd: dict[int, Member] = {}
        self._by_pid: dict[int, Member] = {}
        self._flush_at = 0.0
        self._kill_at: float | None = None
        for rank, (channel, pid) in enumerate(workers):
            self._add(rank, channel, pid)

    def run(self) -> None:
        """Until every worker is gone."""
        try:
            while self._owner.living:
                self._turn()
        finally:
            self._watcher.close()
            self._epoll.close()

    def _add(self, rank: int, channel: Channel, pid: int) -> None:
        """Take a worker in."""
        member = self._owner.add(rank, channel, pid)
        self._by_fd[channel.fileno()] = self._by_pid[pid] = member
        self._epoll.register(channel.fileno(), select.EPOLLIN)
        self._watcher.watch(pid)

    def _turn(self) -> None:
        ready = self._epoll.poll(self._patience())
        for fd, _ in ready:
            if fd == self._watcher.fileno():
                self._deaths()
            elif fd == self._stop:
                self._epoll.unregister(fd)
                self._owner.stop("stopped", "interrupted")
            elif fd in self._by_fd:
                self._listen(self._by_fd[fd], fd)
                if self._watcher.noticed:  # not after all the others' pushes: each may take long
                    self._deaths()
        if self._owner.ask_at is not None and self._owner.now() >= self._owner.ask_at:
            self._owner.timer()
        self._upkeep()

    def _patience(self) -> float:
        """Sleep until somebody speaks, unless there is something to write, to ask or to end."""
        busy = self._owner.trace.pending or self._owner.ending
        waits = [FLUSH_S] if busy else []
        if self._owner.ask_at is not None:
            waits.append(max(0.0, self._owner.ask_at - self._owner.now()))
        return min(waits, default=-1)

    def _listen(self, member: Member, fd: int) -> None:
        try:
            received = member.channel.receive(worker_decoder)
        except (RunError, OSError) as error:
            self._owner.lost(member, str(error))
            received = None
        if received is not None:
            self._owner.handle(member, *received)
        elif not member.gone:
            self._owner.lost(member, "its connection ended")
        if member.gone:
            self._forget(member, fd)

    def _deaths(self) -> None:
        for pid in self._watcher.take():
            member = self._by_pid.pop(pid, None)
            if member is not None and not member.gone:
                self._drain(member)
            if member is not None and not member.gone:
                self._owner.lost(member, "its process was killed")

    def _drain(self, member: Member) -> None:
        """Hear what a dead worker still said: a push that arrived counts."""
        os.set_blocking(member.channel.fileno(), False)
        fd = member.channel.fileno()
        while not member.gone:
            try:
                received = member.channel.receive(worker_decoder)
            except (RunError, OSError):
                break
            if received is None:
                break
            self._owner.handle(member, *received)
        self._by_fd.pop(fd, None)

    def _forget(self, member: Member, fd: int) -> None:
        self._by_fd.pop(fd, None)
        self._by_pid.pop(member.pid, None)
        self._watcher.forget(member.pid)

    def _upkeep(self) -> None:
        now = time.monotonic()
        if now >= self._flush_at:
            self._owner.trace.flush()
            self._flush_at = now + FLUSH_S
        if self._owner.ending:
            self._kill_at = self._kill_at or now + GRACE_S
            if now >= self._kill_at:
                for member in self._owner.living:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member.pid, signal.SIGKILL)
