"""How collectives are timed: at least three times each size, so that one hiccup does not decide."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest

from paceline.parallel.plans import measure_cluster as measured


def clocked(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> list[float]:
    """One rank, whose repeats take so long, over and over; the times that were taken."""
    given, taken = cycle(seconds), []

    def timed(run: Callable[[], None]) -> float:
        run()
        taken.append(next(given))
        return taken[-1]

    monkeypatch.setattr(measured, "_timed", timed)
    monkeypatch.setattr(measured, "_slowest", lambda took: took)
    monkeypatch.setattr(measured.dist, "barrier", lambda: None)
    return taken


@pytest.mark.parametrize(
    ("each_s", "repeats"),
    [(0.001, 5), (0.12, 5), (0.16, 4), (0.25, 3), (100.0, 3)],
)
def test_what_takes_long_is_timed_less_often_but_three_times_at_least(
    each_s: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked(monkeypatch, [each_s])
    ran: list[None] = []
    assert measured._repeats(lambda: ran.append(None)) == [each_s] * repeats
    assert len(ran) == repeats + 1, "the first is not timed"


def test_one_hiccup_on_a_slow_link_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = clocked(monkeypatch, [1.0, 50.0, 1.0])
    sizes: list[int] = []

    def make(whole: int) -> Callable[[], None]:
        sizes.append(whole)
        return lambda: None

    line = measured._line(make, 2)
    assert sizes == [measured.SIZES[0]], "a slow link: no larger size is tried"
    assert len(taken) == 3
    assert line["latency_s"] + measured.SIZES[0] / line["bytes_per_s"] == pytest.approx(1.0, rel=0.01)
