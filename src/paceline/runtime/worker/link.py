"""A worker's side of the conversation with the store."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from paceline.config import RunConfig
from paceline.errors import BadGradient, ConfigError, RunError, RunStopped
from paceline.fabric.board import Board
from paceline.fabric.channel import Channel
from paceline.fabric.segment import Segment
from paceline.protocols import own
from paceline.runtime.checkpoints.optimizer_state import State, packed, unpacked
from paceline.runtime.checkpoints.worker_state import WorkerState
from paceline.runtime.messages import workers as m
from paceline.runtime.worker.model.binding import Binding
from paceline.runtime.worker.peer_barrier import WorkerBarrier
from paceline.store.layout import Layout
from paceline.store.optimizers import OptimizerSpec
from paceline.store.replicas import answer_bytes
from paceline.store.work.budget import Batch, Source
from paceline.store.work.due import LoaderPasses
from paceline.trace.events import leads_now

T = TypeVar("T")


class StoreLink:
    """Requests and answers. Every wait is a blocking receive: asleep in the kernel."""

    def __init__(
        self,
        channel: Channel,
        protocol: str | None,
        settings: dict[str, Any],
        rank: int | None = None,
        correct: str | None = None,
        trigger: float | None = None,
    ) -> None:
        self._channel = channel
        self._granted: deque[Batch] = deque()
        self._said: set[str] = set()
        """What was warned of: once is enough."""
        self._over = False
        self.halted = False
        """Whether it was told that the run is over."""
        self.enough = False
        """Whether there is no further work for anybody."""
        self.segments: list[Segment] = []
        """This worker's segment, its weights, and what else it was given."""
        self._last: State | None = None
        """What the optimizer remembered at the end of the run, once this worker has left."""
        self._barrier: WorkerBarrier | None = None
        """Where this worker decides itself when to go on; None: the store does."""
        self.before_lingering: Callable[[], None] = lambda: None
        """Called when an epoch has no more batches for this worker, before it says so."""
        self.on_after_step: Callable[[int], None] = lambda which: None
        """Called while this worker sleeps: an optimizer's step was taken, and its memory has the weights."""
        self._send(m.Hello(os.getpid(), protocol, settings, rank, own.digest(protocol), correct, trigger))
        welcome, _ = self._expect(m.Welcome)
        self.config: RunConfig = welcome.config
        self.trigger = trigger if welcome.config.trigger is None else welcome.config.trigger
        """From which share of the usual norm on gradients are pushed; None: all are."""
        self.rank = welcome.rank
        self.lead = welcome.lead
        """Whether this worker prints and evaluates for all."""

    def register(
        self,
        binding: Binding,
        optimizer: OptimizerSpec,
        source: Source | None,
        peer: bool = False,
        after_step: tuple[int, ...] = (),
    ) -> m.Ready:
        """Show the model, wait for everybody, and take the memory."""
        message = m.Register(binding.layout, optimizer, source, peer, after_step)
        ready, received = self._introduce(message, binding, lends=self.rank == 0)
        if isinstance(ready, m.Lend):
            ready, received = self._introduce(message, binding, lends=True)
        assert isinstance(ready, m.Ready), "each worker is asked once"
        if ready.barrier is not None:
            board = Board.of(received.pop(), self.config.workers, writable=False)
            self._barrier = WorkerBarrier(ready.barrier, board)
        segment = Segment(received[0], binding.layout.segment_bytes)
        weights = Segment(received[1], binding.layout.weights_bytes, writable=not ready.shared)
        self.segments = [segment, weights, *self._further(received[2:], binding.layout)]
        own = self.config.apply == "increments"
        binding.attach(segment, weights, own, private=ready.shared or not (peer or own))
        for each in self.segments:
            each.close_fd()
        if binding.unlocked:
            self.say(binding.unlocked)
        self._take(ready.batch)
        self._follow(ready.lead)
        return ready

    def _introduce(
        self, message: m.Register, binding: Binding, lends: bool
    ) -> tuple[m.Ready | m.Lend, list[int]]:
        """Describe the model, if wanted with its initial values, and wait."""
        initial = binding.initial() if lends else None
        self._send(message, () if initial is None else (initial.fd,))
        if initial is not None:
            initial.close_fd()
        return self._expect(m.Ready | m.Lend)  # type: ignore[arg-type]

    def _further(self, fds: list[int], layout: Layout) -> list[Segment]:
        """What it was given beside segment and weights."""
        return [Segment(fd, answer_bytes(layout), writable=False) for fd in fds]

    def push(self, message: m.Push) -> m.Release:
        """Announce the gradient, sleep until released."""
        self._send(message)
        if self._barrier is not None:
            added, _ = self._expect(m.Added)
            self._send(self._barrier.wait(added.clock, self._nap))
        release, _ = self._expect(m.Release)
        self._take(release.batch, release.over)
        self._follow(release.lead)
        return release

    def meet(self, message: m.Meet, fds: tuple[int, ...] = ()) -> m.Met:
        """Come to a joint operation, sleep until it is carried out."""
        self._send(message, fds)
        met, _ = self._expect(m.Met)
        if met.release is not None:
            self._take(met.release.batch, met.release.over)
            self._follow(met.release.lead)
        return met

    def begin(self, message: m.Meet, fds: tuple[int, ...] = ()) -> None:
        """Tell of a joint operation, and go on."""
        self._send(message, fds)

    def computed(self, batches: float) -> float:
        """Under a virtual clock: sleep for as long as computing takes; tells how long that was."""
        self._send(m.Computed(batches))
        return self._expect(m.Elapsed)[0].compute_s

    @property
    def granted(self) -> int:
        """Batches in hand that nobody has begun."""
        return len(self._granted)

    def next_batch(self, epoch: int) -> Batch | None:
        """The next batch; None at the end of `epoch`, and of all work."""
        if not (self._granted or self.enough):
            self._take(self._granted_for(m.Draw()))
        if self.enough:
            return None
        if self._granted[0].epoch <= epoch:
            return self._granted.popleft()
        self.before_lingering()
        return self._granted_for(m.Linger(epoch))

    def _granted_for(self, request: m.Draw | m.Linger) -> Batch | None:
        self._send(request)
        grant, _ = self._expect(m.Grant)
        self.enough |= grant.over
        self._follow(grant.lead)
        return grant.batch

    def put_back(self, batch: Batch) -> None:
        """Keep a batch for later."""
        self._granted.appendleft(batch)

    def away(self, distance: bool = False) -> m.Release:
        """Evaluation begins, on fresh weights; or only the replicas' distance is wanted."""
        self._send(m.Away(distance))
        return self._expect(m.Release)[0]

    def back(self, values: dict[str, float], seconds: float) -> m.Release:
        """Evaluation is over."""
        self._send(m.Back(values, seconds))
        return self._expect(m.Release)[0]

    def exchange(self, data: bytes, more: bool) -> dict[int, bytes]:
        """Give bytes, and get those of all."""
        self._send(m.Give(data, more))
        return self._expect(m.Given)[0].parts

    def end_work(self, why: str) -> None:
        """Nobody is to get further work."""
        self.enough = True
        self._send(m.Enough(why))

    def plan(self, epochs: int) -> None:
        """Tell how long the run is going to be."""
        self._send(m.PlanEpochs(epochs))

    @property
    def reaches_state(self) -> bool:
        """Whether what steps for all is on this host, as a whole."""
        return self.config.listen is None and self.config.store_hosts == 1

    def recall(self, weights: bool = False, own: bool = False) -> State:
        """What the optimizer that steps for all remembers; with the weights as `model.` and their names.
        `own`: what this worker's optimizer remembered, by the checkpoint that the run goes on from.

        After this worker has left, what it remembered when the run was over."""
        if self._last is not None:
            return dict(self._last[0]), self._last[1]
        self._send(m.RecallOptimizer(weights, own))
        recalled, fds = self._expect(m.Recalled)
        return unpacked(recalled.slots, fds[0]), recalled.values

    def restore(self, state: State, own: bool = False, ahead: bool = False) -> None:
        """Let it remember this. `own`: a checkpoint is to have it, of this worker's optimizer; if it is
        `ahead`, not without the push that comes next."""
        slots, memory = packed(state[0])
        self._send(m.Restore(slots, state[1], own, ahead), (memory.fd,))
        memory.close_fd()

    def say(self, text: str) -> None:
        """Put a warning on record, once."""
        if text not in self._said:
            self._said.add(text)
            self._send(m.Say("warning", text))

    def note(self, text: str) -> None:
        """Put something on record that a person may like to know."""
        self._send(m.Say("info", text))

    def leave(
        self,
        values: dict[str, float] | None,
        waits: bool = False,
        state: WorkerState | None = None,
        passes: LoaderPasses | None = None,
    ) -> None:
        """Done. If it `waits`, what the run saves lies in this worker's memory afterwards."""
        if not self._over:
            self._over = True
            self._send(m.Leave(values, waits, state, passes))
            if waits:
                self._wait_for_the_end()

    def _wait_for_the_end(self) -> None:
        """Until the model that is saved lies in this worker's memory, and the optimizer's state has come."""
        wanted: Any = m.Release | m.Recalled
        message, fds = self._expect(wanted)
        if isinstance(message, m.Recalled):
            self._last = unpacked(message.slots, fds[0]), message.values
            self._expect(m.Release)

    def fail(self, error: BaseException, text: str) -> None:
        """Tell why the script ended."""
        if not self._over:
            self._over = True
            self._send(m.Failed(_kind(error), text))

    def end(self, error: BaseException | None, text: str, depart: Callable[[], None]) -> None:
        """The script is over: `depart` if it ended well, or was stopped, else tell why."""
        with contextlib.suppress(RunError):
            if error is None or isinstance(error, RunStopped):
                depart()
            else:
                self.fail(error, text)

    def _nap(self, seconds: float) -> None:
        """Sleep for so long; the end of the run ends it at once."""
        if self.config.cluster is not None:
            self._send(m.Nap(seconds))
            self._expect(m.Elapsed)
        elif self._channel.wait(seconds):
            self._expect(m.Halt)

    def _follow(self, lead: bool) -> None:
        """Whoever led before is gone; what this worker prints from here on is shown instead."""
        if lead and not self.lead:
            self.lead = True
            print(leads_now(self.rank), flush=True)

    def _take(self, batch: Batch | None, over: bool = False) -> None:
        self.enough |= over
        if batch is not None:
            self._granted.append(batch)

    def _send(self, message: m.FromWorker, fds: tuple[int, ...] = ()) -> None:
        try:
            self._channel.send(message, fds)
        except OSError as error:
            if isinstance(error, ConnectionError):
                self._heed_last_word()
            raise RunError(f"the store is gone ({error}); the run cannot go on.") from None

    def _heed_last_word(self) -> None:
        """Nobody hears us any more; what was said to us before may tell why."""
        received = None
        with contextlib.suppress(OSError):
            received = self._receive()
        if received is not None and isinstance(received[0], m.Halt):
            raise RunStopped(received[0].text)

    def _receive(self) -> tuple[m.FromStore, list[int]] | None:
        return self._channel.receive(m.store_decoder)

    def _expect(self, kind: type[T]) -> tuple[T, list[int]]:
        received = self._receive()
        while received is not None and isinstance(received[0], m.RunAfterStep):
            self.on_after_step(received[0].which)
            self._send(m.AfterStepRan())
            received = self._receive()
        if received is None:
            raise RunError("the store is gone; the run cannot go on.")
        message, fds = received
        if isinstance(message, m.Halt):
            self._over, self.halted = message.kind == "config", True
            raise RunStopped(message.text)
        if not isinstance(message, kind):
            raise RunError(
                f"expected {getattr(kind, '__name__', kind)} from the store, got {type(message).__name__}."
            )
        return message, fds


def _kind(error: BaseException) -> Literal["config", "error", "fatal"]:
    if isinstance(error, ConfigError):
        return "config"
    return "fatal" if isinstance(error, BadGradient) else "error"
