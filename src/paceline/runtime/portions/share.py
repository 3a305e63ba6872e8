"""A host's share in a store that lies on several: what its relay sends where, and the portion it may hold."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial

from paceline.errors import RunError
from paceline.fabric.segment import Segment
from paceline.fabric.session import Session
from paceline.fabric.tls import Seal
from paceline.fabric.wire import parse_address, show_address
from paceline.runtime.messages import workers as m
from paceline.runtime.messages.memories import SEGMENT
from paceline.runtime.messages.portions import Fresh, FromHolder, PortionPlan
from paceline.runtime.portions.holder import Holder
from paceline.runtime.portions.routes import PortionRoute, PortionRoutes


class HostShare:
    """Knows the plan, once it came; until then the relay has nothing to share."""

    def __init__(
        self, store: tuple[str, int], secret: bytes, listen: str = "", reach: str = "", sealed: bool = False
    ) -> None:
        """`listen`: where, if not at this host's own address; `reach`: what others are told instead;
        `sealed`: hosts speak TLS among each other."""
        self._secret, self._sealed = secret, sealed
        address = parse_address(listen) if listen else (_own_address(store), 0)
        self._holder = Holder(address, secret, Seal() if sealed else None)
        self.reach = reach or show_address(*self._holder.address)
        self._mesh: PortionRoutes | None = None
        self._lock = threading.Lock()
        self.held = self.holds = False
        """Whether a portion was ever here, and whether it is needed still."""

    def planned(
        self,
        plan: PortionPlan,
        weights: Callable[[int], Segment],
        gave_up: Callable[[str], None],
        ended: Callable[[], None],
    ) -> None:
        """The plan came, for the first time or again; `ended`: told when nothing is held any more."""
        with self._lock:
            if self._mesh is not None:
                return
            mesh = self._mesh = PortionRoutes(plan, self._secret, weights, self._hear, gave_up, self._sealed)
        portion = plan.portion_of(plan.number)
        if portion is not None:
            self.held, self.holds, number = True, True, plan.number
            fresh, over = lambda lane: mesh.gate.arrived(lane, number), partial(self._over, ended)
            self._holder.begin(plan, portion, weights, fresh, over)

    def _over(self, ended: Callable[[], None]) -> None:
        self.holds = False
        ended()

    def push(self, session: Session, lane: int, segment: Segment, push: m.Push) -> None:
        """Send a worker's gradient: to the coordinator its portion and the buffers, to holders theirs."""
        mesh = self._started
        plan, memory = mesh.plan, memoryview(segment.map)

        def coordinator() -> None:
            session.send_memory(lane, SEGMENT, memory, *plan.portions[0].gradients)
            session.send_memory(lane, SEGMENT, memory, plan.layout.gradient_end, segment.size_bytes)

        number = mesh.count(lane)
        mesh.push(lane, number, memory, push.missing, coordinator)
        portion = plan.portion_of(plan.number)
        if portion is not None:
            self._holder.pushed_here(lane, number, segment, plan.missing_in(portion, push.missing))

    def tell(self, lane: int, tell: Callable[[], None]) -> None:
        """Pass a release on, when all portions of the weights are there."""
        self._started.gate.wait(lane, tell)

    def close(self) -> None:
        """Hang up everywhere."""
        if self._mesh is not None:
            self._mesh.close()
        self._holder.close()

    @property
    def _started(self) -> PortionRoutes:
        if self._mesh is None:
            raise RunError("a worker is released, but it is unknown which host holds which weights.")
        return self._mesh

    def _hear(self, strand: PortionRoute, lane: int, message: FromHolder) -> None:
        if not isinstance(message, Fresh):
            raise RunError(f"a holder says {type(message).__name__} to a host that is not the coordinator.")
        self._started.gate.arrived(lane, strand.place_of.number)


def _own_address(store: tuple[str, int]) -> str:
    """The address of this machine on the way to the store; nothing is sent to find it."""
    family = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(store)
        return str(probe.getsockname()[0])
