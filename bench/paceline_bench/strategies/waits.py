"""Why workers of `bounded_ps` waited: for the bound on staleness, or for all to start anew."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paceline.trace.events import AnyEvent, Decided, WorkerJoined, WorkerLeft


class Waits(msgspec.Struct, frozen=True):
    """Seconds, of all workers together."""

    bound_s: float = 0.0
    resync_s: float = 0.0


def waits_of(events: Iterable[AnyEvent], resync: int) -> Waits:
    """From each push to its release. Once resync x workers steps have been made since all last started
    together, waiting is for that; before, for the bound."""
    waiting: set[int] = set()
    active: set[int] = set()
    spent = {False: 0.0, True: 0.0}
    last_t, synced, due = 0.0, 0, False
    for event in events:
        if not isinstance(event, Decided | WorkerJoined | WorkerLeft):
            continue
        spent[due] += len(waiting) * (event.t - last_t)
        last_t = event.t
        if not isinstance(event, Decided):
            waiting.discard(event.worker)
            (active.add if isinstance(event, WorkerJoined) else active.discard)(event.worker)
            continue
        if event.pushed is not None:
            waiting.add(event.pushed)
        waiting -= set(event.release)
        due = resync > 0 and event.version - synced >= resync * len(active)
        if due and event.release:
            synced, due = event.version, False
    return Waits(spent[False], spent[True])
