"""A side that is not what it was asked to be is found out, and nobody is left behind."""

from __future__ import annotations

import os
from functools import partial

import pytest

from paceline.errors import RunError
from paceline_bench.harness.crew import BenchCrew, in_turns
from support.stations import Broken, Sleeper


@pytest.mark.long
def test_a_world_of_one_that_was_to_be_two_is_refused() -> None:
    with (
        BenchCrew("side", [partial(Sleeper, 1), partial(Sleeper, 1)]) as crew,
        pytest.raises(RunError, match=r"asked for a world of 2 .* worlds of \[1, 1\]"),
    ):
        crew.muster()


def test_a_round_lasts_as_long_as_its_slowest_worker() -> None:
    with BenchCrew("side", [partial(Sleeper, 2, 0.0), partial(Sleeper, 2, 0.05)]) as crew:
        crew.muster()
        assert crew.round() >= 0.05


def test_sides_take_turns_block_by_block() -> None:
    with BenchCrew("a", [partial(Sleeper, 1)]) as one, BenchCrew("b", [partial(Sleeper, 1, 0.01)]) as other:
        one.muster()
        other.muster()
        seen = in_turns((one, other), blocks=3, rounds=2)
    assert [[len(block) for block in blocks] for blocks in seen] == [[2, 2, 2], [2, 2, 2]]
    assert min(seconds for block in seen[1] for seconds in block) >= 0.01


def test_what_a_station_raises_is_shown() -> None:
    with BenchCrew("side", [partial(Broken, 1)]) as crew:
        crew.muster()
        with pytest.raises(RunError, match="out of order"):
            crew.round()


def test_a_worker_that_vanishes_ends_the_benchmark() -> None:
    with BenchCrew("side", [partial(Sleeper, 1, 30.0)]) as crew:
        crew.muster()
        crew.tell(0, "exchange")
        os.kill(crew.pids[0], 9)
        with pytest.raises(RunError, match="ended unexpectedly"):
            crew.hear(0)


def test_nobody_is_left_when_a_crew_is_closed() -> None:
    crew = BenchCrew("side", [partial(Sleeper, 2), partial(Sleeper, 2)])
    crew.muster()
    pids = crew.pids
    crew.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
