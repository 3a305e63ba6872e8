"""A host's relay: to its workers it looks like the store, to the store it is their host.

Workers of a host talk to the relay as they would talk to the store: over a Unix socket, with their
gradients and weights in shared memory. The relay has the one connection to the store's host. A
worker's push first sends its segment, then the word; a release arrives after the weights it speaks
of, which are received straight into the memory the worker reads. Where all workers of the run read
one buffer, one copy travels per host. A link that is cut makes workers wait, and nothing else.
Peers meet at the store's host: what one brings to a meeting travels ahead of its word, and no more than that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import socket
import tempfile
import threading
from functools import partial
from pathlib import Path

import msgspec

from paceline.errors import RunError
from paceline.fabric.channel import Channel
from paceline.fabric.dialer import Dialer
from paceline.fabric.door import Enter
from paceline.fabric.neighbours import take_neighbour
from paceline.fabric.presence import Allowance
from paceline.fabric.segment import Segment
from paceline.fabric.tls import Trust
from paceline.fabric.watcher import Watcher
from paceline.runtime.hosts.arrivals import Arrivals
from paceline.runtime.hosts.file_transfer import files_of, keep
from paceline.runtime.hosts.host_memory import HostMemory
from paceline.runtime.hosts.local_worker import LocalWorker
from paceline.runtime.hosts.store_share import StoreShare
from paceline.runtime.messages import workers as m
from paceline.runtime.messages.hosts import (
    HOST,
    SHARED,
    WORKER,
    Belongs,
    ClocksNoted,
    Copy,
    Dismissed,
    End,
    Equip,
    Fetch,
    Fetched,
    Gone,
    LendMemory,
    Offer,
    SumVectors,
    ToHost,
    VectorStaged,
    Withdraws,
    guest_decoder,
    shared_decoder,
)
from paceline.runtime.messages.memories import INITIAL, SEGMENT, MemoryStretch
from paceline.runtime.messages.portions import PortionPlan
from paceline.store.disk.folders import partial_of
from paceline.store.replicas import PARAMETERS, answer_bytes

LAST_WORD_S = 10.0
"""How long the relay waits for the store's last word, as long as nothing moves: a replica takes its time."""
LOOK_S = 1.0

_encoder = msgspec.msgpack.Encoder()


class Relay:
    """Serves the workers of one host until all are gone."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        hello: Enter,
        workers: list[tuple[Channel, int]],
        listener: socket.socket | None = None,
        stop: int | None = None,
        trust: Trust | None = None,
        sharing: StoreShare | None = None,
    ) -> None:
        """Workers are channel and pid; more may come through the listener. `stop`: see `RealLoop`;
        `sharing`: this host's part in a store that lies on several."""
        self._folder = Path(tempfile.gettempdir()) / f"paceline-{secrets.token_hex(8)}"
        """For files of peers, if there are any."""
        self._locals: list[LocalWorker] = []
        self._by_fd: dict[int, LocalWorker] = {}
        self._watcher = Watcher()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._memory = HostMemory(self._locals, self._lock)
        self._hopeless = ""
        self.badly = ""
        """Why the run ended for this host otherwise than well: it was lost, or stopped where its store is."""
        self._unreachable = ""
        self._listener = listener
        self._epoll = select.epoll()
        for fd in (self._watcher.fileno(), self._wake, stop, None if listener is None else listener.fileno()):
            if fd is not None:
                self._epoll.register(fd, select.EPOLLIN)
        self._stop = stop
        self._sharing = sharing
        self._dialer = Dialer(address, secret, hello, self, self._lost_run, trust=trust)
        self._session = self._dialer.session
        self._arriving = Arrivals(self._locals, self.place)
        for channel, pid in workers:
            self._add(channel, pid)

    def run(self) -> None:
        """Until the last worker is gone and the store knows it."""
        try:
            self._dialer.open()
            while any(not x.gone for x in self._locals) or not (self._locals or self._hopeless):
                for fd, _ in self._epoll.poll():
                    self._turn(fd)
            self._hold_on()
            self._wait_for_the_last_word()
        finally:
            if self._sharing is not None:
                self._sharing.close()
            self._dialer.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._watcher.close()
            self._epoll.close()

    def _hold_on(self) -> None:
        """A portion is needed until the run is over; that is told over two wires, of which one may be cut."""
        last = Allowance(LAST_WORD_S)
        while self._sharing is not None and self._sharing.held and not self._hopeless:
            for fd, _ in self._epoll.poll(None if self._sharing.holds else max(0.0, last.left_s)):
                self._turn(fd)
                last = Allowance(LAST_WORD_S)
            if not self._sharing.holds and last.over:
                return

    def _wait_for_the_last_word(self) -> None:
        """Not before the store knows that all are gone, unless it cannot be told."""
        last, heard = Allowance(LAST_WORD_S), -1
        while not self._hopeless and not all(x.dismissed for x in self._locals):
            if self._session.heard != heard or not self._session.connected:
                last, heard = Allowance(LAST_WORD_S), self._session.heard
            left = last.left_s
            if left <= 0:
                return
            for fd, _ in self._epoll.poll(min(left, LOOK_S)):
                self._turn(fd)

    def _turn(self, fd: int) -> None:
        if fd == self._watcher.fileno():
            self._deaths()
        elif self._listener is not None and fd == self._listener.fileno():
            taken = take_neighbour(self._listener)
            if taken is not None:
                self._add(Channel(taken[0]), taken[1])
        elif fd == self._wake:
            os.eventfd_read(self._wake)
            if self._hopeless:
                self._end()
            elif self._unreachable:
                for worker in [x for x in self._locals if not x.gone]:
                    self._tell(worker, m.Halt("failed", self._unreachable))
                    self._lost(worker, self._unreachable, torn=True)
        elif fd == self._stop:
            self._epoll.unregister(fd)
            self._hopeless = "interrupted"
            for worker in [x for x in self._locals if not x.gone]:
                self._session.send(worker.lane, _encoder.encode(Withdraws()), HOST)
            self._end()
        elif fd in self._by_fd:
            self._listen(self._by_fd[fd])

    def _add(self, channel: Channel, pid: int) -> None:
        worker = LocalWorker(len(self._locals), channel, pid)
        self._locals.append(worker)
        self._by_fd[channel.fileno()] = worker
        self._epoll.register(channel.fileno(), select.EPOLLIN)
        self._watcher.watch(pid)

    # -- from workers -------------------------------------------------------------------------

    def _listen(self, worker: LocalWorker) -> None:
        try:
            received = worker.channel.receive(m.worker_decoder)
        except (RunError, OSError) as error:
            self._lost(worker, str(error))
            return
        if received is None:
            self._lost(worker, "its connection ended")
            return
        message, fds = received
        if self._hopeless and not isinstance(message, m.Leave | m.Failed):
            self._tell(worker, m.Halt("stopped", self._hopeless))
            return
        if isinstance(message, m.Register):
            self._register(worker, message, fds)
        elif isinstance(message, m.Push) and worker.segment is not None and self._sharing is not None:
            self._sharing.push(self._session, worker.lane, worker.segment, message)
        elif isinstance(message, m.Push) and worker.segment is not None:
            self._session.send_memory(
                worker.lane, SEGMENT, memoryview(worker.segment.map), 0, worker.segment.size_bytes
            )
        elif isinstance(message, m.AfterStepRan):
            self._send_stretches(worker, worker.places.of(PARAMETERS))
        elif isinstance(message, m.Meet):
            self._bring(worker, message, fds)
        elif isinstance(message, m.Leave) and worker.answers is not None:
            self._hand_over(worker)
            self._send_belongings(worker)
        self._session.send(worker.lane, _encoder.encode(message), WORKER)
        if isinstance(message, m.Leave | m.Failed):
            self._forget(worker)

    def _register(self, worker: LocalWorker, message: m.Register, fds: list[int]) -> None:
        layout = worker.layout = message.layout
        if fds:
            initial = Segment(fds[0], layout.weights_bytes + layout.segment_bytes)
            initial.close_fd()
            self._session.send(worker.lane, _encoder.encode(Offer(initial.size_bytes)), HOST)
            self._session.send_memory(worker.lane, INITIAL, memoryview(initial.map), 0, initial.size_bytes)

    def _bring(self, worker: LocalWorker, message: m.Meet, fds: list[int]) -> None:
        """A peer has come: what it brings goes ahead of it, which is nothing for a vote."""
        assert worker.layout is not None, "a peer registers before it meets"
        worker.model = message.model if message.cell is None else None
        worker.asked(message)
        for fd in fds:
            worker.lent.append(Segment(fd, answer_bytes(worker.layout)))
            worker.lent[-1].close_fd()
            self._session.send(worker.lane, _encoder.encode(LendMemory()), HOST)
        call = message.call
        if message.packed:
            self._arriving.brought(self._session, worker, message)
        elif message.brings:
            part = None if call is None else call.part
            self._send_stretches(worker, worker.places.of(message.place, part))

    def _hand_over(self, worker: LocalWorker, place: int = PARAMETERS) -> None:
        """A peer's whole replica, which nobody changes now: where it computes, or where it is kept."""
        if place != PARAMETERS:
            self._send_stretches(worker, worker.places.of(place) + worker.places.of(place + 1))
            return
        model = PARAMETERS if worker.model is None else worker.model
        self._send_stretches(worker, worker.places.replica(model))

    def _send_belongings(self, worker: LocalWorker) -> None:
        """The files of a peer that was stopped."""
        for kind, content in files_of(partial_of(self._folder / "checkpoint"), worker.rank):
            self._session.send(worker.lane, _encoder.encode(Offer(len(content))), HOST)
            self._session.send_memory(worker.lane, INITIAL, content, 0, len(content))
            self._session.send(worker.lane, _encoder.encode(Belongs(kind)), HOST)

    def _send_stretches(self, worker: LocalWorker, stretches: list[MemoryStretch]) -> None:
        for what, start, stop in stretches:
            memory = worker.memory(what)
            if memory is not None:
                self._session.send_memory(worker.lane, what, memoryview(memory.map), start, stop)

    def _deaths(self) -> None:
        dead = set(self._watcher.take())
        for worker in [x for x in self._locals if x.pid in dead and not x.gone]:
            self._drain(worker)
            if not worker.gone:
                self._lost(worker, "its process was killed")

    def _drain(self, worker: LocalWorker) -> None:
        """Pass on what a dead worker still said: a push that was announced counts."""
        os.set_blocking(worker.channel.fileno(), False)
        with contextlib.suppress(RunError, OSError):
            while not worker.gone and select.select([worker.channel], [], [], 0)[0]:
                self._listen(worker)

    def _lost(self, worker: LocalWorker, detail: str, torn: bool = False) -> None:
        text = f"{detail} (process {worker.pid} on host {socket.gethostname()})"
        self._session.send(worker.lane, _encoder.encode(Gone(text, torn)), HOST)
        self._forget(worker)

    def _forget(self, worker: LocalWorker) -> None:
        worker.gone = True
        self._by_fd.pop(worker.channel.fileno(), None)
        self._watcher.forget(worker.pid)
        with self._lock:
            worker.channel.close()

    # -- from the store: called by the session's reading thread -------------------------------

    def place(self, lane: int, what: int, offset: int, length: int | None) -> memoryview:
        """A piece arrives, or (None) all that a memory has is wanted."""
        return self._memory.place(lane, what, offset, length)

    def arrived(self, lane: int, what: int, data: bytes) -> None:
        """A message arrives."""
        if lane == SHARED and what == HOST:
            self._told_all(data)
            return
        if lane >= len(self._locals):
            raise RunError(f"a message for lane {lane}, which does not exist.")
        worker = self._locals[lane]
        if what == HOST:
            self._obey(worker, guest_decoder.decode(data))
        else:
            self._hear(worker, m.store_decoder.decode(data))

    def _told_all(self, data: bytes) -> None:
        """What concerns all workers of the host: how far others are, or that the run is over."""
        told = shared_decoder.decode(data)
        if isinstance(told, ClocksNoted):
            self._memory.note(told)
        else:
            self._gave_up("the run is over")

    def _obey(self, worker: LocalWorker, order: ToHost) -> None:
        if isinstance(order, Equip):
            self._memory.equip(worker, order)
        elif isinstance(order, Fetch):
            self._hand_over(worker, order.place)
            self._session.send(worker.lane, _encoder.encode(Fetched()), HOST)
        elif isinstance(order, Copy):
            self._arriving.copy(worker, order)
        elif isinstance(order, VectorStaged):
            self._arriving.stage(worker, order)
        elif isinstance(order, SumVectors):
            self._arriving.add_up(worker, order)
        elif isinstance(order, PortionPlan) and self._sharing is not None:
            ring = partial(os.eventfd_write, self._wake, 1)
            self._sharing.planned(order, partial(self._memory.weights_of, order), self._cut_off, ring)
        elif isinstance(order, Offer) and order.size_bytes > 0:
            worker.offered = Segment.create(order.size_bytes, "a file")
            worker.offered.close_fd()
        elif isinstance(order, Belongs) and worker.offered is not None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            keep(self._folder / "resume", worker.rank, order.kind, memoryview(worker.offered.map))
            worker.offered = None
        elif isinstance(order, End):
            worker.end()
        elif isinstance(order, Dismissed):
            worker.dismissed = True
            os.eventfd_write(self._wake, 1)

    def _hear(self, worker: LocalWorker, message: m.FromStore) -> None:
        """The store's word for a worker."""
        if isinstance(message, m.Halt) and message.kind == "stopped":
            self.badly = f"the run was stopped where its store is: {message.text}"
        self._tell(worker, message)

    def _tell(self, worker: LocalWorker, message: m.FromStore) -> None:
        if self._sharing is not None and isinstance(message, m.Ready | m.Release):
            self._sharing.tell(worker.lane, partial(self._pass_on, worker, message))
        else:
            self._pass_on(worker, message)

    def _pass_on(self, worker: LocalWorker, message: m.FromStore) -> None:
        fds: tuple[int, ...] = ()
        if isinstance(message, m.Welcome):
            message = worker.welcomed(message, self._folder)
        if isinstance(message, m.Met):
            worker.answered()
            if message.until is not None:  # it is about to save its state
                self._folder.mkdir(mode=0o700, exist_ok=True)
        if isinstance(message, m.Ready):
            fds = self._memory.fds(worker, message.shared, message.barrier is not None)
        with self._lock, contextlib.suppress(OSError):
            if not worker.gone:
                worker.channel.send(message, fds)

    def _lost_run(self, why: str) -> None:
        """The store is gone, or cannot be reached any more."""
        holds = self._sharing is not None and self._sharing.held
        if holds or not self._locals or not all(worker.dismissed for worker in self._locals):
            self.badly = self.badly or f"the run is lost: {why}"
        self._gave_up(why)

    def _gave_up(self, why: str) -> None:
        self._hopeless = why
        os.eventfd_write(self._wake, 1)

    def _cut_off(self, why: str) -> None:
        """A host that holds a portion of the store cannot be reached any more: no worker here can go on."""
        self._unreachable = why
        os.eventfd_write(self._wake, 1)

    def _end(self) -> None:
        """The store cannot be reached any more, or somebody stopped us: nobody is to wait for ever."""
        for worker in [x for x in self._locals if not x.gone]:
            self._tell(worker, m.Halt("stopped", self._hopeless))
