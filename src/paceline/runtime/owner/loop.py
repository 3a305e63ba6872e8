"""The loop of a real run: it sleeps until somebody speaks, and lets the owner act on it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time

from paceline.errors import RunError
from paceline.fabric.channel import Channel, WorkerLine
from paceline.fabric.neighbours import take_neighbour
from paceline.fabric.presence import Allowance
from paceline.fabric.stop_signals import why_stopped
from paceline.fabric.watcher import Watcher
from paceline.runtime.hosts.remote_hosts import RemoteHosts
from paceline.runtime.hosts.remote_worker import RemoteEvent, RemoteWorker
from paceline.runtime.messages import workers as m
from paceline.runtime.messages.hosts import Fetched
from paceline.runtime.messages.workers import worker_decoder
from paceline.runtime.owner.owner import Owner
from paceline.runtime.owner.stuck import StuckWatch
from paceline.runtime.run.member import Member

FLUSH_S = 0.1
"""How long a trace event may stay unwritten."""
GATHER_S = 600.0
"""How long a store may wait for workers that somebody else starts; who was to come may have died before."""
GRACE_S = 10.0
"""How long a worker may take to end by itself once the run is over."""
LONGEST_GRACE_S = 600.0
"""The same, while replicas of other hosts still arrive."""


class RealLoop:
    """Single-threaded, asleep in epoll; a watcher thread tells of deaths."""

    def __init__(
        self,
        owner: Owner,
        workers: list[tuple[Channel, int]],
        stop: int | None = None,
        guests: RemoteHosts | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Workers are channel and pid, by rank; `stop` becomes readable when the run is to end; further
        workers come from other hosts, or (through `listener`) from this one."""
        self._owner = owner
        owner.attend = lambda member: self._turn()
        self._turns = 0
        self._watcher = Watcher()
        self._epoll = select.epoll()
        self._epoll.register(self._watcher.fileno(), select.EPOLLIN)
        self._stop = stop
        if stop is not None:
            self._epoll.register(stop, select.EPOLLIN)
        self._by_fd: dict[int, Member] = {}
        self._by_pid: dict[int, Member] = {}
        self._guests = guests
        self._holders = owner.fileno()
        """Where those are heard who hold portions of the store; None: nobody does."""
        if self._holders is not None:
            self._epoll.register(self._holders, select.EPOLLIN)
        self._by_line: dict[RemoteWorker, Member] = {}
        if guests is not None:
            self._epoll.register(guests.fileno(), select.EPOLLIN)
        self._listener = listener
        self._newcomers: dict[int, tuple[Channel, int]] = {}
        """Processes of this host that have not said yet who they are."""
        self._gathers = None if listener is None else Allowance(GATHER_S)
        if listener is not None:
            self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._stuck = StuckWatch(owner, self._drop)
        self._flush_at = 0.0
        self._grace: Allowance | None = None
        """What workers have to end, once the run is over."""
        self._longest_grace: Allowance | None = None
        self._arrived = 0
        for rank, (channel, pid) in enumerate(workers):
            self._add(rank, channel, pid)

    def run(self) -> None:
        """Until every worker is gone."""
        try:
            while self._owner.living or self._owner.expecting:
                self._turn()
        finally:
            self._turn_away()
            self._owner.conclude()
            if self._guests is not None:
                self._guests.close()
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
        self._turns = turn = self._turns + 1
        for fd, _ in ready:
            if self._turns != turn:
                break  # a turn within this one has heard who was ready
            member = self._by_fd.get(fd)
            if member is not None:
                self._listen(member, fd)
                if self._watcher.noticed:  # not after all the others' pushes: each may take long
                    self._deaths()
            elif fd == self._watcher.fileno():
                self._deaths()
            elif fd == self._stop:
                self._epoll.unregister(fd)
                self._owner.stop("stopped", why_stopped(fd))
            elif fd == self._holders:
                self._owner.turn()
            elif self._guests is not None and fd == self._guests.fileno():
                for heard in self._guests.take():
                    self._hear(heard)
            elif self._listener is not None and fd == self._listener.fileno():
                self._open(self._listener)
            elif fd in self._newcomers:
                self._introduce(fd)
        if self._owner.ask_at is not None and self._owner.now() >= self._owner.ask_at:
            self._owner.timer()
        self._upkeep()

    def _patience(self) -> float:
        """Sleep until somebody speaks, unless there is something to write, to ask or to end."""
        busy = self._owner.trace.pending or self._owner.ending or self._owner.keeping.busy
        waits = [FLUSH_S if busy else self._stuck.due_s]
        if self._owner.ask_at is not None:
            waits.append(max(0.0, self._owner.ask_at - self._owner.now()))
        if self._gathers is not None and self._owner.expecting:
            waits.append(max(0.0, self._gathers.left_s))
        overdue = self._guests.overdue() if self._guests is not None else None
        return min(waits if overdue is None else [*waits, overdue])

    def _hear(self, heard: RemoteEvent) -> None:
        """A worker of another host spoke, or is gone."""
        if isinstance(heard.message, m.Hello):
            self._admit(heard.line)
        member = self._by_line.get(heard.line)
        if member is None or member.gone:
            heard.line.close()
            return
        if heard.message is None:
            self._owner.lost(member, heard.detail)
        elif isinstance(heard.message, Fetched):
            self._owner.look()
        else:
            self._owner.handle(member, heard.message, heard.fds)

    def _admit(self, line: RemoteWorker) -> None:
        """A worker of another host wants to take part."""
        rank = self._place(line, line.rank)
        if rank is not None:
            line.rank = rank
            self._by_line[line] = self._owner.add(rank, line, line.pid)

    def _place(self, line: WorkerLine, wanted: int | None) -> int | None:
        """The rank a newcomer gets, its own or a free one; None when it is turned away."""
        workers, taken = self._owner.config.workers, {x.rank for x in self._owner.living}
        free = [rank for rank in range(workers) if rank not in taken and not self._owner.closed]
        rank = free[0] if wanted is None and free else wanted
        if rank is not None and rank in free:
            return rank
        who = "another worker" if rank is None else f"rank {rank}"
        why = self._owner.closed or f"that place in a run of {workers} is taken."
        with contextlib.suppress(OSError):
            line.send(m.Halt("config", f"{who} came, but {why}"))
        line.close()
        return None

    def _open(self, listener: socket.socket) -> None:
        """A process of this host has come."""
        taken = take_neighbour(listener)
        if taken is not None:
            channel, pid = Channel(taken[0]), taken[1]
            self._newcomers[channel.fileno()] = channel, pid
            self._epoll.register(channel.fileno(), select.EPOLLIN)

    def _turn_away(self) -> None:
        """The run is over: who is about to say who it is has to hear that, and why."""
        word = self._owner.last_word or m.Halt("stopped", "the run is over already.")
        for channel, _ in self._newcomers.values():
            with contextlib.suppress(OSError):
                channel.send(word)
            channel.close()
        self._newcomers = {}

    def _introduce(self, fd: int) -> None:
        """It says who it is, or goes."""
        channel, pid = self._newcomers.pop(fd)
        self._epoll.unregister(fd)
        received = None
        with contextlib.suppress(RunError, OSError):
            received = channel.receive(worker_decoder)
        hello = received[0] if received is not None else None
        rank = self._place(channel, hello.rank) if isinstance(hello, m.Hello) else None
        if rank is None or hello is None:
            channel.close()
            return
        self._add(rank, channel, pid)
        self._owner.handle(self._by_fd[fd], hello, [])

    def _listen(self, member: Member, fd: int) -> None:
        try:
            received = member.near.receive(worker_decoder)
        except (RunError, OSError) as error:
            self._owner.lost(member, str(error))
            received = None
        if received is not None:
            self._owner.handle(member, *received)
        elif not member.gone:
            self._epoll.unregister(fd)
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
        os.set_blocking(member.near.fileno(), False)
        fd = member.near.fileno()
        while not member.gone:
            try:
                received = member.near.receive(worker_decoder)
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
        self._owner.keeping.tell()
        if self._guests is not None:
            self._guests.closed = self._owner.closed
        if now >= self._flush_at:
            self._owner.trace.flush()
            self._flush_at = now + FLUSH_S
        if self._gathers is not None and self._owner.expecting and self._gathers.over:
            came, workers = len(self._owner.members), self._owner.config.workers
            self._owner.halt("failed", f"{came} of {workers} workers came within {GATHER_S:g} s.")
        self._stuck.look(now)
        if self._owner.ending:
            self._be_patient()
            if self._grace is not None and self._grace.over:
                for member in self._owner.living:
                    self._end(member)

    def _be_patient(self) -> None:
        """Workers get some time to end, and more as long as replicas are on their way."""
        if self._longest_grace is None:
            self._longest_grace = Allowance(LONGEST_GRACE_S)
        arrived = self._guests.frames if self._guests is not None and self._owner.closed else 0
        if self._grace is None or (arrived > self._arrived and not self._longest_grace.over):
            self._grace = Allowance(GRACE_S + self._owner.patience_s)
        self._arrived = arrived

    def _drop(self, member: Member, detail: str) -> None:
        """Leave a worker behind that is stuck; that of another host is ended there."""
        fd = None if member.far else member.near.fileno()
        if isinstance(member.channel, RemoteWorker):
            member.channel.end()
        self._owner.lost(member, detail)
        if fd is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
            self._forget(member, fd)

    def _end(self, member: Member) -> None:
        """It had its time."""
        if not isinstance(member.channel, Channel):
            self._owner.lost(member, "it did not end when the run did")
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
