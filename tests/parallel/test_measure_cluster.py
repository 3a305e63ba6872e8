"""How collectives are timed: in turn, at least three times each size, so that no hiccup decides."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest

from paceline.parallel.plans import measure_cluster as measured
from paceline.plan.profile.cluster import Kind


def clocked(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
    """One rank, whose repeats take so long, over and over."""
    given = cycle(seconds)

    def timed(run: Callable[[], None]) -> float:
        run()
        return next(given)

    monkeypatch.setattr(measured, "_timed", timed)
    monkeypatch.setattr(measured, "_slowest", lambda took: took)
    monkeypatch.setattr(measured.dist, "barrier", lambda: None)


@pytest.mark.parametrize(
    ("each_s", "repeats"),
    [(0.001, 11), (0.05, 11), (0.09, 7), (0.25, 3), (100.0, 3)],
)
def test_what_takes_long_is_timed_less_often_but_three_times_at_least(
    each_s: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked(monkeypatch, [each_s])
    ran: list[None] = []
    took = measured._repeats({"all_gather": lambda: ran.append(None)})
    assert took == {"all_gather": [each_s] * repeats}
    assert len(ran) == repeats + 1, "the first is not timed"


def test_collectives_take_turns_so_that_what_slows_the_machine_slows_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocked(monkeypatch, [0.001])
    ran: list[Kind] = []
    kinds: tuple[Kind, ...] = ("all_gather", "all_reduce")
    measured._repeats({kind: lambda kind=kind: ran.append(kind) for kind in kinds})
    assert ran == list(kinds) * (measured.REPEATS + 1)


def test_one_hiccup_on_a_slow_link_does_not_decide_and_is_in_the_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocked(monkeypatch, [1.0, 50.0, 1.0])
    sizes: list[int] = []

    def make(whole: int) -> Callable[[], None]:
        sizes.append(whole)
        return lambda: None

    found = measured._lines({"all_reduce": make})
    assert sizes == [measured.SIZES[0]], "a slow link: no larger size is tried"

    def seconds(name: str) -> float:
        line = found[name]["all_reduce"]
        return float(line["latency_s"] + measured.SIZES[0] / line["bytes_per_s"])

    assert seconds("low") == pytest.approx(seconds("lines")) == pytest.approx(1.0, rel=0.01)
    assert seconds("high") > 30
