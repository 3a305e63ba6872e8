"""When a checkpoint on the way is taken, what is told of it, and that nothing else is harmed if it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
import torch

from paceline.config import RunConfig
from paceline.runtime.checkpoints.writer import CheckpointWriter
from paceline.store.disk.checkpoint import Snapshot
from paceline.store.disk.folders import saved_in
from paceline.trace import TraceWriter, read_trace
from paceline.trace.events import Kept, Note
from support.traces import started

TAKEN = Snapshot({"w": torch.ones(3)}, {}, "state.json", b"{}")


class Desk:
    """A keeper, its clock and its trace."""

    def __init__(self, folder: Path, every: str | None) -> None:
        self.folder, self.now = folder, 0.0
        self.trace = TraceWriter(folder / "trace.jsonl")
        self.trace.write(started())
        config = RunConfig(run="r", folder=str(folder), checkpoint_every=every)
        self.keeping = CheckpointWriter(config, self.trace, lambda: self.now)

    def keep(self, updates: int, taken: Snapshot = TAKEN) -> None:
        self.keeping.keep(updates, 4 * updates, lambda: lambda: taken)
        self.keeping.tell(wait=True)

    def told(self) -> list[str | int]:
        """Versions that were kept, and warnings."""
        self.trace.flush()
        events = list(read_trace(self.folder))[1:]
        return [e.version if isinstance(e, Kept) else e.text for e in events if isinstance(e, Kept | Note)]


Desks = Callable[[str | None], Desk]


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[Desks]:
    """Makes one, and closes its trace."""
    made: list[Desk] = []

    def make(every: str | None) -> Desk:
        made.append(Desk(tmp_path, every))
        return made[-1]

    yield make
    for desk in made:
        desk.trace.close()


def due(desk: Desk, updates: range) -> list[int]:
    """At which of these one is taken."""
    kept = []
    for number in updates:
        if desk.keeping.due(number):
            desk.keep(number)
            kept.append(number)
    return kept


def test_one_is_due_after_every_so_many_updates_of_the_whole_run(desks: Desks) -> None:
    desk = desks("4")
    desk.keeping.begin(6)
    assert due(desk, range(6, 18)) == [8, 12, 16]
    assert desk.told() == [8, 12, 16]


def test_one_that_could_not_be_taken_when_it_was_due_is_taken_with_the_next_update(desks: Desks) -> None:
    desk = desks("4")
    assert due(desk, range(5, 20, 3)) == [5, 8, 14, 17]


def test_one_is_due_when_the_time_has_passed_and_there_was_an_update(desks: Desks) -> None:
    desk = desks("2m")
    desk.now = 119.0
    assert not desk.keeping.due(7)
    desk.now = 120.0
    assert not desk.keeping.due(0)
    assert desk.keeping.due(7)
    desk.keep(7)
    desk.now = 239.0
    assert not desk.keeping.due(9)


def test_none_is_ever_due_unless_asked_for(desks: Desks) -> None:
    desk = desks(None)
    desk.now = 1e9
    assert not desk.keeping.due(10**9)


def test_none_is_due_while_one_is_being_written(desks: Desks, tmp_path: Path) -> None:
    desk, written = desks("1"), Event()

    def slowly() -> Snapshot:
        assert written.wait(60)
        return TAKEN

    desk.keeping.keep(1, 4, lambda: slowly)
    desk.keeping.tell()
    assert desk.keeping.busy
    assert not desk.keeping.due(2)
    assert saved_in(tmp_path) is None
    written.set()
    desk.keeping.tell(wait=True)
    assert desk.keeping.due(2)
    assert saved_in(tmp_path) == tmp_path / "checkpoint"


def test_a_failure_is_told_once_and_says_what_remains(desks: Desks, tmp_path: Path) -> None:
    desk = desks("1")
    desk.keep(1)
    (tmp_path / "checkpoint.partial").write_text("in the way")
    desk.keep(2)
    desk.keep(3)
    (tmp_path / "checkpoint.partial").unlink()
    desk.keep(4)
    first, warning, last = desk.told()
    assert (first, last) == (1, 4)
    assert "the checkpoint after 2 updates could not be written: " in str(warning)
    assert "The one after 1 updates remains; training continues" in str(warning)


def test_a_copy_that_cannot_be_taken_is_a_warning_too(desks: Desks) -> None:
    desk = desks("1")

    def too_much() -> Snapshot:
        raise MemoryError("not enough of it")

    desk.keeping.keep(5, 20, too_much)  # type: ignore[arg-type]
    assert not desk.keeping.busy
    [warning] = desk.told()
    assert "after 5 updates could not be written: not enough of it" in str(warning)


@pytest.mark.parametrize("every", ["1.5", "s", "1d", "", "infs", " "])
def test_what_is_no_interval_is_refused(every: str) -> None:
    with pytest.raises(ValueError, match=r"takes a number of updates such as 500"):
        RunConfig(run="r", folder="f", checkpoint_every=every)
