"""The coordinator's side of the holders: orders go out, what they say comes to the owner's loop."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from safetensors.torch import load, save
from torch import Tensor

from paceline.errors import RunError
from paceline.fabric.presence import Allowance
from paceline.fabric.segment import Segment, check_room
from paceline.runtime.messages.portions import (
    COORDINATOR,
    MASTER,
    SHOWN,
    STATE,
    Broke,
    Complete,
    Contents,
    FromHolder,
    Gather,
    OrdersDone,
    PortionOrder,
    PortionPlan,
    ShowWeights,
    Summed,
    Wake,
    WeightsShown,
)
from paceline.runtime.portions.routes import PortionRoute, PortionRoutes
from paceline.store.spread.portions import Deed, SumOrder, of_whole, to_whole

LOOK_S = 0.2
LAST_WORD_S = 2.0


class Told(NamedTuple):
    """A word of a holder."""

    holder: int
    lane: int
    message: FromHolder


class Coordinator:
    """All holders, as the owner sees them. `fileno()` becomes readable when `take()` has something."""

    def __init__(self, secret: bytes, patience_s: float, sealed: bool = False) -> None:
        self._secret, self._sealed = secret, sealed
        self._patience_s = patience_s
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._told: deque[Told] = deque()
        self._mesh: PortionRoutes | None = None
        self._orders = 0
        self._changed = threading.Condition()
        self._values: dict[int, dict[str, Any]] = {}
        self._complete: set[int] = set()
        self._shown: set[int] = set()
        self._sums: dict[int, Summed] = {}
        self._broken = ""
        self.look: Callable[[], object] = lambda: None
        """Called while the owner's loop waits here: whether a host has to be given up."""

    def fileno(self) -> int:
        """For the owner's epoll."""
        return self._wake

    def take(self) -> list[Told]:
        """What holders said since the last call, in order."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        return [self._told.popleft() for _ in range(len(self._told))]

    @property
    def mesh(self) -> PortionRoutes:
        """The ways to the holders, once the run has begun."""
        assert self._mesh is not None
        return self._mesh

    def begin(
        self,
        plan: PortionPlan,
        weights: Segment,
        state: tuple[dict[str, Tensor], dict[str, Any]],
        memory: Callable[[int], Segment],
    ) -> None:
        """Give every holder its portion of the weights, and of the optimizer's state if there is some."""
        mesh = self._mesh = PortionRoutes(plan, self._secret, memory, self._hear, self._gave_up, self._sealed)
        for number, strand in mesh.strands.items():
            tensors, values = (of_whole(plan.optimizer, strand.portion, part) for part in state)
            data = save(tensors) if tensors else b""
            mesh.tell(number, Contents(len(data), values))
            mesh.send_memory(number, STATE, memoryview(data), 0, len(data))
            mesh.send_memory(number, MASTER, memoryview(weights.map), *strand.portion.weights)
            mesh.tell(number, Complete())

    def order(self, deeds: list[Deed | SumOrder | Wake]) -> None:
        """Tell all holders what to do next."""
        self._orders += 1
        for number in self.mesh.strands:
            self.mesh.tell(number, PortionOrder(self._orders, deeds))

    def sums(self) -> list[float]:
        """The squares of what the last order had added up, from one portion to the next."""
        self._wait(self._not_added_up, "add up its portion of the gradients", self.look)
        if self._broken:
            raise RunError(self._broken)
        return [square for number in self.mesh.strands for square in self._sums[number].squares]

    def gather(self, weights: Segment) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Get all portions of the weights back, into one memory; and of the optimizer's state."""
        if not self._broken:
            self.ask(memoryview(weights.map))
        return self.arrived()

    def gather_weights(self, memory: Segment) -> None:
        """Get the portions of the weights alone, as the orders given so far make them."""
        with self._changed:
            self._shown.clear()
        for number, strand in self.mesh.strands.items():
            strand.further[SHOWN] = memoryview(memory.map)
            self.mesh.tell(number, ShowWeights())
        self._wait(self._not_shown, "show its portion of the weights", self.look)
        if self._broken:
            raise RunError(self._broken)

    def spread_weights(self, memory: Segment) -> None:
        """Give every holder its portion of these weights; it has them before it is told anything else."""
        for number, strand in self.mesh.strands.items():
            self.mesh.send_memory(number, MASTER, memoryview(memory.map), *strand.portion.weights)

    def ask(self, weights: memoryview) -> None:
        """Have all portions sent to this memory, as the orders given so far make them."""
        with self._changed:
            self._complete.clear()
        for number, strand in self.mesh.strands.items():
            strand.further.pop(STATE, None)
            strand.further[MASTER] = weights
            self.mesh.tell(number, Gather())

    def arrived(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Wait for what was asked for; the optimizer's state of all portions. Any thread may."""
        self._wait(self._not_complete, "hand over its portion of the weights")
        if self._broken:
            raise RunError(self._broken)
        spec, tensors, values = self.mesh.plan.optimizer, dict[str, Tensor](), dict[str, Any]()
        for number, strand in self.mesh.strands.items():
            state = strand.further.get(STATE)
            tensors |= to_whole(spec, strand.portion, {} if state is None else load(bytes(state)))
            values |= to_whole(spec, strand.portion, self._values[number])
        return tensors, values

    def give_up(self, why: str) -> None:
        """A portion is lost, and so the whole is."""
        with self._changed:
            self._broken = self._broken or why
            self._changed.notify_all()

    def close(self) -> None:
        """Let the holders go."""
        if self._mesh is not None:
            for number in self._mesh.strands:
                self._mesh.tell(number, OrdersDone())
            self._mesh.close(LAST_WORD_S)

    def _wait(
        self, missing: Callable[[], list[int]], what: str, look: Callable[[], object] = lambda: None
    ) -> None:
        """Until no holder is missing any more, or one of them has been silent for too long."""
        heard, patience = -1, Allowance(self._patience_s)
        with self._changed:
            while (late := missing()) and not self._broken:
                self._changed.wait(LOOK_S)
                look()
                if (now := self.mesh.received_bytes(late[0])) != heard:
                    heard, patience = now, Allowance(self._patience_s)
                elif patience.over:
                    self._broken = f"host {self.mesh.strands[late[0]].place_of.name} did not {what}"

    def _not_complete(self) -> list[int]:
        return [number for number in self.mesh.strands if number not in self._complete]

    def _not_shown(self) -> list[int]:
        return [number for number in self.mesh.strands if number not in self._shown]

    def _not_added_up(self) -> list[int]:
        sums, order = self._sums, self._orders
        return [number for number in self.mesh.strands if number not in sums or sums[number].order != order]

    # -- called by reading threads ------------------------------------------------------------

    def _hear(self, strand: PortionRoute, lane: int, message: FromHolder) -> None:
        number = strand.place_of.number
        if isinstance(message, Contents):
            check_room(message.size_bytes, "the state of an optimizer")
            if message.size_bytes > 0:
                strand.further[STATE] = memoryview(bytearray(message.size_bytes))
            self._values[number] = message.values
        elif isinstance(message, Complete | Summed | WeightsShown):
            with self._changed:
                if isinstance(message, Summed):
                    self._sums[number] = message
                else:
                    (self._complete if isinstance(message, Complete) else self._shown).add(number)
                self._changed.notify_all()
        else:
            if isinstance(message, Broke):
                self.give_up(f"host {strand.place_of.name}: {message.text}")
            self._post(Told(number, lane, message))

    def _gave_up(self, why: str) -> None:
        self.give_up(why)
        self._post(Told(COORDINATOR, 0, Broke(why)))

    def _post(self, told: Told) -> None:
        self._told.append(told)
        os.eventfd_write(self._wake, 1)
