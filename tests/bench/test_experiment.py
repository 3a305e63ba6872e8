"""What holds for all experiments: every run once, in order, kept; a place only where something is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from paceline_bench.experiment import Experiment, Turn, carried_out
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.harness.record import BenchRow
from paceline_bench.kept import KeptOutcomes


class Chore(msgspec.Struct, frozen=True):
    number: int

    @property
    def title(self) -> str:
        return f"chore {self.number}"


class Did(msgspec.Struct, frozen=True):
    job: Chore
    trouble: str = ""


class Done(KeptOutcomes[Chore, Did]):
    kind = Did


class Told(NamedTuple):
    opened: list[str]
    made: list[int]
    said: list[str]


def carry_out(turns: Callable[[Done], Iterator[list[int]]], folder: Path, breaks_at: int = 0) -> Told:
    """Run the chores that the turns name, in places that are told; the one that breaks is interrupted."""
    told, results = Told([], [], []), Done(folder / "kept.jsonl")

    @contextmanager
    def place() -> Iterator[Callable[[Chore, str, str], Did]]:
        told.opened.append("place")
        yield run

    def run(job: Chore, who: str, title: str) -> Did:
        if job.number == breaks_at:
            raise KeyboardInterrupt
        told.made.append(job.number)
        return Did(job)

    def every(made: Path) -> Iterator[Turn[Chore, str, Did]]:
        for numbers in turns(results):
            yield Turn([(Chore(number), "somebody") for number in numbers], place)

    rows = [BenchRow(case={}, measured={}, figure="count", value=1.0)]
    experiment = Experiment("chores", results, lambda: 4, every, lambda did: "done", lambda: rows)
    assert carried_out(experiment, BenchPlan(results=str(folder / "kept.jsonl")), told.said.append) == rows
    return told


def test_what_two_turns_want_is_run_once_and_a_turn_that_lacks_nothing_opens_no_place(tmp_path: Path) -> None:
    told = carry_out(lambda results: iter([[1, 2], [2, 1], [2, 3, 3]]), tmp_path)
    assert (told.made, len(told.opened)) == ([1, 2, 3], 2)
    assert told.said[-1].startswith("chore 3 (3 of 4): done; about ")
    again = carry_out(lambda results: iter([[1, 2], [2, 1], [2, 3, 4]]), tmp_path)
    assert (again.made, len(again.opened)) == ([4], 1)
    assert "3 runs are in" in again.said[0]
    assert again.said[-1].startswith("chore 4 (4 of 4)")


def test_a_turn_is_chosen_by_what_earlier_ones_gave(tmp_path: Path) -> None:
    def turns(results: Done) -> Iterator[list[int]]:
        yield [1]
        yield [2 if results.get(Chore(1)) else 3]

    assert carry_out(turns, tmp_path).made == [1, 2]


def test_an_interrupted_one_keeps_what_was_over_and_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        carry_out(lambda results: iter([[1, 2, 3]]), tmp_path, breaks_at=2)
    assert len(Done(tmp_path / "kept.jsonl")) == 1
    assert carry_out(lambda results: iter([[1, 2, 3]]), tmp_path).made == [2, 3]
