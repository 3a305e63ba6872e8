"""A host that holds a portion of the store.

Gradients arrive from all hosts straight into memory of this one; those of its own workers are here
already. One thread looks at what has arrived, tells the coordinator, and carries its orders out, one
after the other. Only that thread writes the portion's weights. A reader gets them sent when an order
says so: outside of lockstep as a copy, so that the next step may begin meanwhile.
"""

from __future__ import annotations

import math
import mmap
import os
import queue
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from paceline.errors import PacelineError, RunError
from paceline.fabric.door import Door, Enter
from paceline.fabric.segment import Segment, check_room
from paceline.fabric.session import Session
from paceline.fabric.tls import Seal
from paceline.runtime.messages import portions as p
from paceline.runtime.messages.hosts import SHARED
from paceline.runtime.messages.memories import SEGMENT, WEIGHTS
from paceline.store.corrections.correction import GradientPart
from paceline.store.parameters import Gradients
from paceline.store.spread.portions import (
    Awake,
    Forget,
    KeepGradient,
    Mend,
    Parts,
    Portion,
    PortionStore,
    Pushed,
    StepEach,
    StepOrder,
    SumOrder,
)

PLANNED_S = 4.0
"""How long who comes early is kept waiting; then it may call again."""
_encoder = msgspec.msgpack.Encoder()


class HolderMemory:
    """As large as the model's, but only what is used of it takes room."""

    def __init__(self, size_bytes: int) -> None:
        self.map = mmap.mmap(-1, size_bytes)
        self.bytes: Tensor = torch.frombuffer(self.map, dtype=torch.uint8)


class Caller:
    """A host that has come: its workers' gradients arrive, their weights are sent."""

    def __init__(self, holder: Holder, number: int) -> None:
        self.number = number
        self._holder = holder
        self.session = Session(self, lambda why, closed: None)
        self.version: int | None = None
        """Of the weights that were sent to all its workers together."""
        self.copies: dict[int, HolderMemory] = {}

    def place(self, lane: int, what: int, offset: int, length: int) -> memoryview:
        """Where a piece belongs."""
        return self._holder.place(self.number, lane, what, offset, length)

    def arrived(self, lane: int, what: int, data: bytes) -> None:
        """A message; what it asks for is done in turn."""
        message = p.to_holder.decode(data)
        if not isinstance(message, p.GradientPiece) and self.number != p.COORDINATOR:
            raise RunError(f"host {self.number} gives orders, but is not the coordinator.")
        self._holder.hear(self.number, lane, message)


class Holder:
    """One portion, and the thread that carries orders out on it."""

    def __init__(self, address: tuple[str, int], secret: bytes, seal: Seal | None = None) -> None:
        self._planned = threading.Event()
        self._callers: dict[str, Caller] = {}
        self._by_number: dict[int, Caller] = {}
        self._events: queue.SimpleQueue[tuple[int, int, p.ToHolder] | None] = queue.SimpleQueue()
        self._staged: dict[tuple[int, int], Gradients] = {}
        self._memories: dict[tuple[int, int], HolderMemory | Segment] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._kept: dict[Pushed, Gradients] = {}
        self._spare: list[Gradients] = []
        self._total: Gradients | None = None
        """What was added up for the next step."""
        self._orders = 0
        self._state: HolderMemory | None = None
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._own_version: int | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-holder", daemon=True)
        self._door = Door(address, secret, self._welcome, seal)
        self.address = self._door.address

    def begin(
        self,
        plan: p.PortionPlan,
        portion: Portion,
        weights: Callable[[int], Segment],
        fresh: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        """The run begins. `weights`: where workers of this host read; `fresh`: theirs are up to date;
        `ended`: nobody needs the portion any more."""
        self.plan, self.portion = plan, portion
        self._master = HolderMemory(plan.layout.weights_bytes)
        self._store = PortionStore(plan.layout, plan.optimizer, portion, self._master.bytes)
        self._store.correct(plan.correct)
        self._layout = self._store.layout
        if plan.clip_norm is not None:
            self._store.norm_by_parameter()
        self._weights, self._fresh, self._ended = weights, fresh, ended
        self._thread.start()
        self._planned.set()

    def close(self) -> None:
        """Let go; what was said arrives if it can."""
        self._door.close()
        self._events.put(None)
        for caller in self._callers.values():
            if caller.session.connected:
                caller.session.drain(1.0)
            caller.session.close()

    # -- called by reading threads ------------------------------------------------------------

    def place(self, number: int, lane: int, what: int, offset: int, length: int) -> memoryview:
        """Memory for what a host sends; nothing outside of this portion."""
        memory: HolderMemory | Segment | None = None
        start, stop = self.portion.weights
        if what == SEGMENT:
            start, stop = self.portion.gradients
            memory = self._memory(number, lane)
        elif number == p.COORDINATOR and what == p.MASTER:
            memory = self._master
        elif number == p.COORDINATOR and what == p.STATE and self._state is not None:
            memory, start, stop = self._state, 0, len(self._state.map)
        if memory is None or offset < start or offset + length > stop:
            raise RunError(f"{length} bytes at {offset} for a memory that was not agreed on.")
        return memoryview(memory.map)[offset : offset + length]

    def hear(self, number: int, lane: int, message: p.ToHolder) -> None:
        """Something to be done in turn; but room for what follows is made at once."""
        if isinstance(message, p.Contents):
            check_room(message.size_bytes, "the state of an optimizer")
            self._state = HolderMemory(message.size_bytes) if message.size_bytes > 0 else None
            self._values = message.values
        self._events.put((number, lane, message))

    def pushed_here(self, lane: int, number: int, segment: Segment, missing: tuple[int, ...]) -> None:
        """A worker of this host has pushed: its gradient is here."""
        self._memories[self.plan.number, lane] = segment
        self._events.put((self.plan.number, lane, p.GradientPiece(number, missing)))

    def _memory(self, number: int, lane: int) -> HolderMemory | Segment:
        if (number, lane) not in self._memories:
            check_room(self.portion.gradients[1] - self.portion.gradients[0], "a gradient of another host")
            self._memories[number, lane] = HolderMemory(self._layout.segment_bytes)
        return self._memories[number, lane]

    def _welcome(self, asked: Enter) -> tuple[Session, bytes]:
        if not self._planned.wait(PLANNED_S):
            raise OSError("the plan of the run has not come yet")
        if asked.session not in self._callers:
            if asked.received or asked.number in {caller.number for caller in self._callers.values()}:
                raise RunError(
                    f"host {asked.host} ({asked.number}) is another one than the one that was here."
                )
            self._callers[asked.session] = self._caller(asked.number)
        session = self._callers[asked.session].session
        if session.impossible:
            raise RunError(f"host {asked.host} said what cannot be: {session.impossible}")
        return session, b""

    def _caller(self, number: int) -> Caller:
        """A host by its number; what it is to get waits until it comes."""
        with self._lock:
            return self._by_number.setdefault(number, Caller(self, number))

    # -- the portion's own thread -------------------------------------------------------------

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._do(*event)
            except Exception as error:  # torch's own included: the coordinator must not wait for ever
                text = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
                self._tell(p.Broke(text))
                return

    def _do(self, number: int, lane: int, message: p.ToHolder) -> None:
        match message:
            case p.GradientPiece():
                self._stage(number, lane, message)
            case p.PortionOrder():
                self._obey(message)
            case p.Complete():
                self._restore()
            case p.Gather():
                self._hand_over()
            case p.ShowWeights():
                self._send_weights(p.SHOWN)
                self._tell(p.WeightsShown())
            case p.OrdersDone():
                self._ended()
            case p.Contents():
                pass

    def _restore(self) -> None:
        """Go on from an optimizer's saved state."""
        tensors = {} if self._state is None else load(self._state.map[:])
        self._store.load(tensors, self._values)
        self._state = None

    def _stage(self, number: int, lane: int, piece: p.GradientPiece) -> None:
        """A gradient is here: tell its norm, before anything is decided about it."""
        key = number, lane
        gradients = self._staged.get(key)
        if gradients is None:
            gradients = self._staged[key] = Gradients(self._layout, self._memory(*key).bytes)
        gradients.missing, self._numbers[key] = frozenset(piece.missing), piece.number
        self._use_cores()
        squares = self._store.squares(gradients)
        bad = None if math.isfinite(sum(squares)) else gradients.bad_parameter(self._layout)
        self._tell(p.PieceStaged(number, lane, piece.number, squares, bad))

    def _obey(self, order: p.PortionOrder) -> None:
        if order.number != self._orders + 1:
            raise RunError(f"order {order.number} came after order {self._orders}.")
        self._orders = order.number
        wakes = [deed for deed in order.deeds if isinstance(deed, p.Wake)]
        for deed in [*(x for x in order.deeds if not isinstance(x, p.Wake)), *self._in_turn(wakes)]:
            match deed:
                case StepOrder():
                    self._step(deed)
                case StepEach():
                    self._step_each(deed)
                case KeepGradient():
                    self._keep(deed.pushed)
                case Mend():
                    self._store.mend(self._find(deed.pushed), self._read(deed.pushed))
                case Awake():
                    self._store.awake(frozenset(deed.workers))
                case Forget():
                    self._store.forget(deed.worker)
                case SumOrder():
                    self._tell(p.Summed(order.number, self._add_up(deed)))
                case p.Wake():
                    self._wake(deed)

    def _in_turn(self, wakes: list[p.Wake]) -> list[p.Wake]:
        """Every holder begins with another host, and comes to its own last."""
        own = self.plan.number
        hosts = 1 + max([own, *(wake.host for wake in wakes)])
        return sorted(wakes, key=lambda wake: (wake.host - own - 1) % hosts)

    def _add_up(self, wanted: SumOrder) -> list[float]:
        """Make what the next step is made with; the squares of its norm."""
        self._use_cores()
        found = [(self._find(pushed), share) for pushed, share in wanted.parts]
        total, squares = self._store.add_up(found, self._aside if wanted.aside else None)
        self._total = None if wanted.aside else total
        return squares

    def _step_each(self, step: StepEach) -> None:
        self._use_cores()
        found = [(self._find(pushed), share) for pushed, share in step.parts]
        if not math.isfinite(sum(sum(self._store.squares(each)) for each, _ in found)):
            raise RunError("a worker's gradient overflows. Scale the loss down.")
        self._total = None
        named = zip(step.workers, found, strict=True)
        parts = [GradientPart(worker, each, share, gone) for (worker, gone), (each, share) in named]
        self._store.apply_each(parts, step.settings, step.stride)
        self._free(step.parts)

    @cached_property
    def _aside(self) -> Gradients:
        """Memory for a sum that is only looked at."""
        return Gradients(self._layout, HolderMemory(self._layout.segment_bytes).bytes)

    def _read(self, pushed: Pushed) -> Tensor:
        """The weights that a worker was sent last."""
        if pushed.host == self.plan.number:
            return self._weights(pushed.lane).bytes
        return self._caller(pushed.host).copies[pushed.lane].bytes

    def _step(self, step: StepOrder) -> None:
        if self._total is None and not math.isfinite(sum(self._add_up(SumOrder(step.parts)))):
            raise RunError("the sum of the workers' gradients overflows. Scale the loss down.")
        total, self._total = self._total, None
        assert total is not None
        if not step.whole:
            self._store.step_singly()
        self._store.apply(total, step.settings, step.scale, step.norm, self.plan.clip_norm)
        self._free(step.parts)

    def _free(self, parts: Parts) -> None:
        for pushed, _ in parts:
            if pushed in self._kept:
                self._spare.append(self._kept.pop(pushed))

    def _find(self, pushed: Pushed) -> Gradients:
        if pushed in self._kept:
            return self._kept[pushed]
        key = pushed.host, pushed.lane
        if self._numbers.get(key) != pushed.number:
            raise RunError(f"push {pushed.number} of worker {key} is wanted, but is not here.")
        return self._staged[key]

    def _keep(self, pushed: Pushed) -> None:
        """Copy a gradient that waits: its memory is about to be written again."""
        source = self._find(pushed)
        if not self._spare:
            self._spare.append(Gradients(self._layout, HolderMemory(self._layout.segment_bytes).bytes))
        copy = self._kept[pushed] = self._spare.pop()
        for target, values in zip(copy.flats, source.flats, strict=True):
            target.copy_(values)
        copy.missing = source.missing

    def _wake(self, wake: p.Wake) -> None:
        if wake.host == self.plan.number:
            self._refresh_here(wake)
            return
        caller = self._caller(wake.host)
        if self.plan.shared and caller.version != wake.version:
            caller.version = wake.version
            caller.session.send_memory(SHARED, WEIGHTS, memoryview(self._master.map), *self.portion.weights)
        elif not self.plan.shared:
            copy = caller.copies.get(wake.lane) or HolderMemory(self._layout.weights_bytes)
            caller.copies[wake.lane] = copy
            self._give(copy.bytes, wake)
            caller.session.send_memory(wake.lane, WEIGHTS, memoryview(copy.map), *self.portion.weights)
        queue = SHARED if self.plan.shared else None
        caller.session.send(wake.lane, _encoder.encode(p.Fresh()), queue=queue)

    def _refresh_here(self, wake: p.Wake) -> None:
        if not self.plan.shared or self._own_version != wake.version:
            self._own_version = wake.version
            self._give(self._weights(SHARED if self.plan.shared else wake.lane).bytes, wake)
        self._fresh(wake.lane)

    def _give(self, memory: Tensor, wake: p.Wake) -> None:
        """What the worker is to compute on, or to evaluate."""
        if wake.own:
            self._store.copy_weights(memory)
        else:
            self._store.hand_out(memory)

    def _hand_over(self) -> None:
        """All that the coordinator needs to save the run, as it is now."""
        tensors, values = self._store.export()
        state = save(tensors) if tensors else b""
        session = self._caller(p.COORDINATOR).session
        self._tell(p.Contents(len(state), values))
        session.send_memory(p.ASIDE, p.STATE, memoryview(state), 0, len(state))
        self._send_weights(p.MASTER)
        self._tell(p.Complete())

    def _send_weights(self, what: int) -> None:
        """A copy, since training may go on."""
        copy = HolderMemory(self._layout.weights_bytes)
        self._store.copy_weights(copy.bytes)
        session = self._caller(p.COORDINATOR).session
        session.send_memory(p.ASIDE, what, memoryview(copy.map), *self.portion.weights)

    def _tell(self, message: msgspec.Struct) -> None:
        self._caller(p.COORDINATOR).session.send(p.ASIDE, _encoder.encode(message))

    def _use_cores(self) -> None:
        """In lockstep no worker computes meanwhile."""
        self._store.use_cores((os.cpu_count() or 1) if self.plan.shared else 1)
