"""What is still to happen, in order: the events of a simulated run.

Events of one moment go by priority, then by the order in which they were planned, so that nothing
depends on chance or on hashing.

One heap of ten thousand events spends its time waiting for memory, since each event taken looks at
a dozen others all over the place. So time is cut into slices: an event is appended to its slice, and
a slice is put in order when its time has come. Slices that turn out crowded are cut finer.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain

# Priorities within one moment: losses first, pushes before the timer that would give them up. What
# happens at the very moment a run is stopped still counts. What is sent at one moment leaves together.
KILL, JOIN, STORE_FREE, ARRIVAL, TIMER, LOOK, SEND, STOP = range(8)

Event = tuple[float, int, int, int, float, int]
"""Time, priority, sequence number, worker; of an arrival also its compute seconds and position."""

_CROWDED, _ROOMY = 512, 64


class Agenda:
    """Takes events, and hands them out from the earliest to the last.

    Invariant: what belongs to the slice `_at` or an earlier one is in `_near` or `_soon`.
    """

    def __init__(self) -> None:
        self._near: list[Event] = []  # the last one comes first
        self._soon: list[Event] = []  # a heap: planned when their slice had been put in order already
        self._slices: dict[int, list[Event]] = {}
        self._order: list[int] = []  # of slices, a heap
        self._per_s = 1.0
        self._at = -1

    def __bool__(self) -> bool:
        return bool(self._near or self._soon or self._slices)

    def __iter__(self) -> Iterator[Event]:
        """Take events out until there are none; more may be added meanwhile."""
        near, soon = self._near, self._soon
        while True:
            while near:
                yield heappop(soon) if soon and soon[0] < near[-1] else near.pop()
            if soon:
                yield heappop(soon)
            elif self._slices:
                self._look_ahead()
            else:
                return

    def add(self, event: Event) -> None:
        """Plan an event; not for a time that is over."""
        at = int(event[0] * self._per_s)
        if at <= self._at:
            heappush(self._soon, event)
        elif (events := self._slices.get(at)) is not None:
            events.append(event)
        else:
            self._slices[at] = [event]
            heappush(self._order, at)

    def clear(self) -> None:
        """Nothing more is to happen."""
        for events in (self._near, self._soon, self._slices, self._order):
            events.clear()

    def _look_ahead(self) -> None:
        self._at = heappop(self._order)
        events = self._slices.pop(self._at)
        events.sort(reverse=True)
        if len(events) > _CROWDED and events[0][0] > events[-1][0]:
            self._cut_finer(events)
        else:
            self._near.extend(events)

    def _cut_finer(self, crowd: list[Event]) -> None:
        self._per_s *= len(crowd) / _ROOMY
        everything = [*crowd, *chain.from_iterable(self._slices.values())]
        self._at = int(crowd[-1][0] * self._per_s) - 1
        self._slices.clear()
        self._order.clear()
        for event in everything:
            self.add(event)
