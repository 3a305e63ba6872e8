"""The timeline is cut from the events without loss and without overlap."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from paceline.trace import tally
from paceline.trace.events import AnyEvent, Decided, RunEnded, WorkerJoined, WorkerLeft
from paceline.view.report.gantt import merged
from paceline.view.report.spans import StateSpan, spans
from view.synthetic import EXCHANGE_S, SyntheticRun

PACED = ("bsp", "ssp", "dssp", "asp")


@pytest.mark.parametrize("protocol", PACED)
def test_compute_wait_and_exchange_add_up_to_the_time_between_first_and_last(protocol: str) -> None:
    of: dict[int, list[StateSpan]] = defaultdict(list)
    for span in spans(SyntheticRun(protocol, slow={3: 2.5}, pushes=300).events()):
        of[span.worker].append(span)
    assert sorted(of) == [0, 1, 2, 3]
    for found in of.values():
        assert found[0].start == pytest.approx(0.0, abs=1e-9)
        assert all(a.end == pytest.approx(b.start) for a, b in pairwise(found))
        assert sum(span.seconds for span in found) == pytest.approx(found[-1].end)


@pytest.mark.parametrize("protocol", PACED)
def test_waits_are_the_ones_the_tally_counts(protocol: str) -> None:
    events = list(SyntheticRun(protocol, slow={3: 2.5}, dies=(2, 50), pushes=300).events())
    waited: dict[int, float] = defaultdict(float)
    for span in spans(events):
        if span.state == "wait":
            waited[span.worker] += span.seconds
    counted = tally(events).wait_s
    assert waited == pytest.approx({rank: s for rank, s in counted.items() if s > 0})


def test_each_state_lasts_as_long_as_the_events_say() -> None:
    found = list(
        spans(
            [
                WorkerJoined(0.0, 0),
                Decided(1.5, 1, 0, 1, compute_s=1.0),
                Decided(2.0, 2, None, 1, release=(0,), exchange_s=0.25),
                Decided(4.0, 3, 0, 2, compute_s=1.0, release=(0,), exchange_s=0.5),
                RunEnded(4.25, "finished"),
            ]
        )
    )
    assert found == [
        StateSpan(0, "compute", 0.5, 1.5),
        StateSpan(0, "wait", 1.5, 2.0),
        StateSpan(0, "exchange", 2.0, 2.25),
        StateSpan(0, "compute", 3.0, 4.0),
        StateSpan(0, "exchange", 4.0, 4.25),
    ]


def test_exchange_of_a_worker_released_by_another_is_its_own_or_the_verdicts() -> None:
    events: list[AnyEvent] = [
        Decided(1.0, 1, 0, 0, compute_s=1.0, exchange_s=0.5),
        Decided(2.0, 2, 1, 1, compute_s=2.0, exchange_s=0.25, release=(0, 1)),
        RunEnded(9.0, "finished"),
    ]
    exchanged = {span.worker: span.seconds for span in spans(events) if span.state == "exchange"}
    assert exchanged == {0: 0.5, 1: 0.25}


def test_a_wait_ends_when_its_worker_is_lost() -> None:
    events: list[AnyEvent] = [
        WorkerJoined(0.0, 0),
        Decided(1.0, 1, 0, 1, compute_s=1.0),
        WorkerLeft(3.0, 0, "died"),
    ]
    assert list(spans(events)) == [StateSpan(0, "compute", 0.0, 1.0), StateSpan(0, "wait", 1.0, 3.0)]


def test_thin_bars_are_drawn_together_and_cover_the_same_time() -> None:
    found = [span for span in spans(SyntheticRun("bsp", pushes=400).events()) if span.worker == 0]
    drawn = merged(found, 1.0)
    assert len(drawn) < len(found) / 4
    assert (drawn[0].start, drawn[-1].end) == (found[0].start, found[-1].end)
    assert all(a.end == pytest.approx(b.start) for a, b in pairwise(drawn))
    assert merged(found, EXCHANGE_S / 1000) != []
