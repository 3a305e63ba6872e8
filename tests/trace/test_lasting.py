"""A trace with gaps adds up to the same result as a whole one."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocols.paced.ssp import SSP
from paceline.trace import Result, read_trace, tally
from paceline.trace.events import (
    AnyEvent,
    Decided,
    Evaluated,
    Exchanged,
    Gap,
    ModelReady,
    Passed,
    Reported,
    RunEnded,
    WorkerJoined,
    WorkerLeft,
)
from paceline.trace.lasting import MANY, LastingTrace
from support.drive import Schedule
from support.traces import run_of, started


def paced_run() -> Iterator[AnyEvent]:
    """With a death, an evaluation and losses on the way."""
    for number, event in enumerate(run_of(SSP(2), Schedule(workers=3, deaths=((7, 1),), seed=4))):
        yield event
        yield Reported(event.t, 0, number, {"loss": 1.0 / (number + 1)})
        if number == 0:
            yield ModelReady(0.0, 10, 40, 40)
        if number == 20:
            yield Evaluated(event.t, 0, 9, 99, {"accuracy": 0.5})


def peer_run() -> Iterator[AnyEvent]:
    """Two workers that average."""
    yield started(2, family="peer")
    yield from (WorkerJoined(0.0, rank) for rank in (0, 1))
    for number in range(60):
        now = 0.1 * number
        for rank in (0, 1):
            push = 2 * number + rank + 1
            yield Decided(now, push, rank, push, fate="apply", release=(rank,), samples=4, clock=number + 1)
        yield Exchanged(now, "average", (0, 1), 64 + number, answer_bytes=32)
        yield Passed(now, 0, looks=1, asked=2)
    yield from (WorkerLeft(6.5, rank, "finished") for rank in (0, 1))
    yield RunEnded(7.0, "finished")


RUNS = {
    "paced": [event for event in paced_run() if not isinstance(event, RunEnded)],
    "peer": list(peer_run()),
}
RUNS["paced"].append(RunEnded(max(event.t for event in RUNS["paced"]) + 1, "finished"))


class Full(LastingTrace):
    """On a disk that is full now and then."""

    full = False
    cut = 0
    """How much of what is written there is still room for."""

    def _put(self, data: bytearray) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._put(data)


def written(folder: Path, events: list[AnyEvent], full: list[int]) -> Result:
    """What the trace adds up to if the disk is full from and to these events."""
    (folder / "trace.jsonl").unlink(missing_ok=True)
    trace = Full(folder / "trace.jsonl")
    for number, event in enumerate(events):
        trace.full = sum(each <= number for each in full) % 2 == 1 and not isinstance(event, RunEnded)
        trace.write(event)
        trace.flush()
    trace.close()
    return tally(read_trace(folder)).result()


@pytest.mark.parametrize("kind", RUNS)
@given(full=st.lists(st.integers(0, len(RUNS["paced"]) - 1), max_size=5))
def test_the_result_is_the_same_wherever_the_disk_was_full(
    tmp_path_factory: pytest.TempPathFactory, kind: str, full: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    events = RUNS[kind]
    whole, torn = tally(events).result(), written(folder, events, full)
    assert as_told(torn) == pytest.approx(as_told(whole))
    kept = [event for event in read_trace(folder) if not isinstance(event, MANY)]
    for few in (event for event in events if not isinstance(event, MANY)):
        assert few in kept, "what there is little of waits until there is room"
    assert isinstance(kept[-1], RunEnded)


def as_told(result: object, name: str = "") -> dict[str, object]:
    """Every figure of a result by its path, so that they can be compared to rounding."""
    value = msgspec.to_builtins(result)
    if not isinstance(value, dict | list):
        return {name: value}
    parts = value if isinstance(value, dict) else dict(enumerate(value))
    return {
        path: figure for key, each in parts.items() for path, figure in as_told(each, f"{name}.{key}").items()
    }


@pytest.mark.parametrize("limit_bytes", [0, 1000, 4000])
@pytest.mark.parametrize("kind", RUNS)
def test_a_bounded_trace_adds_up_to_the_same_result(tmp_path: Path, kind: str, limit_bytes: int) -> None:
    events = RUNS[kind]
    trace = LastingTrace(tmp_path / "trace.jsonl", limit_bytes)
    for event in events:
        trace.write(event)
    trace.close()
    read = list(read_trace(tmp_path))
    assert as_told(tally(read).result()) == pytest.approx(as_told(tally(events).result()))
    single = sum(len(msgspec.json.encode(event)) for event in read if isinstance(event, MANY))
    assert single < limit_bytes + 400
    assert any(isinstance(event, Gap) and event.wanted for event in read)


def test_a_line_that_was_cut_off_in_the_middle_is_taken_back(tmp_path: Path) -> None:
    events = RUNS["paced"]
    trace = LastingTrace(tmp_path / "trace.jsonl")
    trace.write(events[0])
    trace.flush()
    before = (tmp_path / "trace.jsonl").read_bytes()
    real, calls = trace._file, iter([7])

    class Short:
        def write(self, data: memoryview) -> int:
            for size in calls:
                return int(real.write(data[:size]) or 0)
            raise OSError(errno.EIO, "Input/output error")

        def fileno(self) -> int:
            return real.fileno()

        def close(self) -> None:
            real.close()

    trace._file = Short()  # type: ignore[assignment]
    trace.write(next(event for event in events if isinstance(event, Decided)))
    trace.flush()
    assert (tmp_path / "trace.jsonl").read_bytes() == before
    trace.close()
