"""What every second of a worker went to, as its trace has it."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.trace import Tally
from paceline.trace.events import AnyEvent, Decided


def unbooked_s(events: Iterable[AnyEvent]) -> list[float]:
    """Per worker: the time that it took part, less compute, waiting and exchange."""
    tally, exchange_s = Tally(), dict[int, float]()
    paced = True
    for event in events:
        tally.add(event)
        paced = tally.start is not None and tally.start.family == "paced"
        if isinstance(event, Decided) and event.pushed is not None:
            exchange_s[event.pushed] = exchange_s.get(event.pushed, 0.0) + event.exchange_s
    spent = exchange_s if paced else tally.travel_s
    return [
        present - tally.compute_s[rank] - tally.wait_s.get(rank, 0.0) - spent.get(rank, 0.0)
        for rank, present in sorted(tally.present_s.items())
    ]
