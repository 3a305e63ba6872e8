"""Events come in the order of time, however they were planned: compared with one heap of all."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random

import pytest

from paceline.sim.agenda import Agenda, Event


def event(time: float, kind: int, number: int) -> Event:
    return (time, kind, number, 0, 0.0, 0)


@pytest.mark.parametrize("unit_s", [1e-6, 0.1, 1000.0])
@pytest.mark.parametrize("seed", range(5))
def test_events_come_as_from_one_heap_whatever_is_planned_meanwhile(seed: int, unit_s: float) -> None:
    random, agenda, heap = Random(seed), Agenda(), list[Event]()
    for number in range(3000):
        first = event(random.choice([0.0, random.random(), round(random.random(), 1)]) * unit_s, 3, number)
        agenda.add(first)
        heappush(heap, first)
    for number, taken in enumerate(agenda, 3000):
        assert taken == heappop(heap)
        for _ in range(random.choice([0, 1, 1]) if number < 10_000 else 0):
            after_s = random.choice([0.0, 0.001, 0.5, random.expovariate(1.0)]) * unit_s
            planned = event(taken[0] + after_s, random.randrange(6), 10_000 + number)
            agenda.add(planned)
            heappush(heap, planned)
    assert not heap
    assert not agenda


def test_a_crowd_of_one_moment_goes_by_priority_then_by_number() -> None:
    agenda = Agenda()
    events = [event(1.0, number % 6, number) for number in range(2000)]
    for planned in events:
        agenda.add(planned)
    assert list(agenda) == sorted(events)


def test_nothing_happens_after_a_clear() -> None:
    agenda = Agenda()
    for number in range(1000):
        agenda.add(event(number / 100, 3, number))
    taken = iter(agenda)
    next(taken)
    agenda.clear()
    assert not agenda
    assert list(taken) == []
