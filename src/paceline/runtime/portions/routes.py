"""A host's ways to those that hold portions of the store: gradients go there, weights come back.

Each way is a session of its own, so it outlives cuts. A worker may go on when the coordinator has said
so *and* all holders have sent their weights: the gate keeps the word until then.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import msgspec

from paceline.errors import ConfigError, RunError
from paceline.fabric.dialer import Dialer
from paceline.fabric.door import Enter
from paceline.fabric.segment import Segment
from paceline.fabric.tls import Trust
from paceline.runtime.messages.memories import SEGMENT, WEIGHTS
from paceline.runtime.messages.portions import (
    ASIDE,
    COORDINATOR,
    STATE,
    FromHolder,
    GradientPiece,
    HolderPlace,
    PortionPlan,
    from_holder,
)
from paceline.store.spread.portions import Portion

encoder = msgspec.msgpack.Encoder()


class Gate:
    """Lets a word through to a worker when every holder's weights are there."""

    def __init__(self, holders: int) -> None:
        self._holders = holders
        self._lock = threading.Lock()
        self._arrived: dict[int, set[int]] = {}
        self._waiting: dict[int, Callable[[], None]] = {}

    def arrived(self, lane: int, holder: int) -> None:
        """A holder's weights for a worker are there."""
        with self._lock:
            self._arrived.setdefault(lane, set()).add(holder)
        self._look(lane)

    def wait(self, lane: int, tell: Callable[[], None]) -> None:
        """The word for a worker is there."""
        with self._lock:
            self._waiting[lane] = tell
        self._look(lane)

    def _look(self, lane: int) -> None:
        with self._lock:
            ready = lane in self._waiting and len(self._arrived.get(lane, ())) == self._holders
            tell = self._waiting.pop(lane) if ready else None
            if ready:
                self._arrived[lane] = set()
        if tell is not None:
            tell()


class PortionRoute:
    """The way to one holder."""

    def __init__(
        self,
        place: HolderPlace,
        portion: Portion,
        weights: Callable[[int], Segment],
        hear: Callable[[PortionRoute, int, FromHolder], None],
    ) -> None:
        self.place_of = place
        self.portion = portion
        self._weights = weights
        self._hear = hear
        self.further: dict[int, memoryview] = {}
        """Memories for contents, while they are gathered."""

    def place(self, lane: int, what: int, offset: int, length: int) -> memoryview:
        """Weights arrive for a worker, or for all of this host."""
        memory = memoryview(self._weights(lane).map) if what == WEIGHTS else self.further.get(what)
        start, stop = self.portion.weights
        if what == STATE:
            start, stop = 0, 0 if memory is None else len(memory)
        if memory is None or offset < start or offset + length > stop:
            raise RunError(f"{length} bytes at {offset} for a memory that was not agreed on.")
        return memory[offset : offset + length]

    def arrived(self, lane: int, what: int, data: bytes) -> None:
        """A word of the holder's."""
        self._hear(self, lane, from_holder.decode(data))


class PortionRoutes:
    """The ways from one host to all holders but itself."""

    def __init__(
        self,
        plan: PortionPlan,
        secret: bytes,
        weights: Callable[[int], Segment],
        hear: Callable[[PortionRoute, int, FromHolder], None],
        gave_up: Callable[[str], None],
        sealed: bool = False,
    ) -> None:
        """`weights` is the memory that arrives for a lane; words of holders are `hear`d. `sealed`: by TLS,
        under certificates that the holders made."""
        trust = Trust() if sealed else None
        self.plan = plan
        self.gate = Gate(len(plan.holders))
        self._numbers: dict[int, int] = {}
        self._dialers: dict[int, Dialer] = {}
        self.strands: dict[int, PortionRoute] = {}
        for place, portion in zip(plan.holders, plan.portions[1:], strict=True):
            if place.number != plan.number:
                strand = self.strands[place.number] = PortionRoute(place, portion, weights, hear)
                hello = Enter(secrets.token_hex(16), socket.gethostname(), number=plan.number)
                lost = partial(_lost, place, gave_up)
                self._dialers[place.number] = Dialer(place.address, secret, hello, strand, lost, trust=trust)
                threading.Thread(target=self._open, args=(place.number, lost), daemon=True).start()

    def count(self, lane: int) -> int:
        """The number of a worker's next push, from 1."""
        self._numbers[lane] = self._numbers.get(lane, 0) + 1
        return self._numbers[lane]

    @cached_property
    def in_turn(self) -> list[int]:
        """Where gradients go, one after the other. Every host begins with another, so that not all of them
        send to one at a time while the links of the others lie idle."""
        number = self.plan.number
        others = [*([] if number == COORDINATOR else [COORDINATOR]), *self.strands]
        first = number % len(others) if others else 0
        return others[first:] + others[:first]

    def push(
        self,
        lane: int,
        number: int,
        segment: memoryview,
        missing: Sequence[int],
        coordinator: Callable[[], None] = lambda: None,
    ) -> None:
        """Send a worker's gradient, each piece to its holder; `coordinator` sends the first portion."""
        for holder in self.in_turn:
            if holder == COORDINATOR:
                coordinator()
                continue
            strand = self.strands[holder]
            session = self._dialers[holder].session
            session.send_memory(lane, SEGMENT, segment, *strand.portion.gradients)
            self.tell(holder, GradientPiece(number, self.plan.missing_in(strand.portion, missing)), lane)

    def tell(self, holder: int, message: msgspec.Struct, lane: int = ASIDE) -> None:
        """Say something to one holder, after what was said to it on this lane before."""
        self._dialers[holder].session.send(lane, encoder.encode(message))

    def send_memory(self, holder: int, what: int, memory: memoryview, start: int, stop: int) -> None:
        """Send one holder a stretch of memory."""
        self._dialers[holder].session.send_memory(ASIDE, what, memory, start, stop)

    def received_bytes(self, holder: int) -> int:
        """How much has come from one holder so far, signs of life included."""
        return self._dialers[holder].session.received_bytes

    def close(self, drain_s: float = 0.0) -> None:
        """Hang up, after what was said has arrived, where it can."""
        for dialer in self._dialers.values():
            dialer.close(drain_s if dialer.session.connected else 0.0)

    def _open(self, holder: int, lost: Callable[[str], None]) -> None:
        try:
            self._dialers[holder].open()
        except (ConfigError, RunError) as error:
            lost(str(error))


def _lost(place: HolderPlace, gave_up: Callable[[str], None], why: str) -> None:
    gave_up(f"host {place.name}, which holds a portion of the store, cannot be reached: {why}")
