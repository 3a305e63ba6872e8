"""Traces on disk: what is written is read, whole or while it grows, and nothing else is believed."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from paceline.errors import TraceError
from paceline.trace import TraceTail, TraceWriter, read_trace, tally
from paceline.trace.events import AnyEvent, Evaluated, Note, Reported, RunEnded
from support.traces import ONE_OF_EACH, started


def write(path: Path, events: list[AnyEvent], batch_bytes: int = 1 << 16) -> None:
    writer = TraceWriter(path, batch_bytes)
    for event in events:
        writer.write(event)
    writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_there_is_one_of_every_event_type() -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(AnyEvent.__args__)


@pytest.mark.parametrize("batch_bytes", [1, 300, 1 << 16])
def test_what_is_written_is_read_back(path: Path, batch_bytes: int) -> None:
    write(path, ONE_OF_EACH, batch_bytes)
    assert list(read_trace(path)) == ONE_OF_EACH


def test_a_run_folder_is_read_as_its_trace(path: Path) -> None:
    write(path, ONE_OF_EACH)
    assert list(read_trace(path.parent)) == ONE_OF_EACH


def test_every_event_is_one_line_of_json(path: Path) -> None:
    write(path, ONE_OF_EACH)
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert [msgspec.json.decode(line)["t"] for line in lines] == [event.t for event in ONE_OF_EACH]


def test_writing_again_appends(path: Path) -> None:
    write(path, ONE_OF_EACH[:5])
    write(path, ONE_OF_EACH[5:])
    assert list(read_trace(path)) == ONE_OF_EACH


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_read_back_as_nan(path: Path, value: float) -> None:
    diverged = [Reported(1.0, 0, 1, {"loss": value, "lr": 0.1}), Evaluated(2.0, 0, 1, 4, {"loss": value})]
    write(path, [started(), *diverged])
    _, reported, evaluated = read_trace(path)
    assert isinstance(reported, Reported)
    assert isinstance(evaluated, Evaluated)
    assert math.isnan(reported.values["loss"])
    assert reported.values["lr"] == 0.1
    assert math.isnan(evaluated.values["loss"])


# While it grows


def test_a_tail_reads_each_event_once_as_soon_as_it_is_flushed(path: Path) -> None:
    writer, tail = TraceWriter(path), TraceTail(path)
    assert tail.new_events() == []
    for event in ONE_OF_EACH:
        writer.write(event)
        assert tail.new_events() == []
        writer.flush()
        assert tail.new_events() == [event]
        assert tail.new_events() == []
    writer.close()


def test_a_tail_waits_for_a_trace_that_is_not_there_yet(path: Path) -> None:
    tail = TraceTail(path)
    assert tail.new_events() == []
    write(path, ONE_OF_EACH)
    assert tail.new_events() == ONE_OF_EACH


def test_a_tail_leaves_a_half_written_line_until_it_is_whole(path: Path) -> None:
    write(path, ONE_OF_EACH)
    whole = path.read_bytes()
    tail, seen = TraceTail(path), []
    for cut in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:cut])
        seen += tail.new_events()
        assert len(seen) == whole[:cut].count(b"\n")
    path.write_bytes(whole)
    assert seen + tail.new_events() == ONE_OF_EACH


@pytest.mark.parametrize("line", [b"garbage", b"\xff\xfe", b'{"t": 1.0, "event": "unheard_of"}'])
def test_a_tail_names_the_file_and_the_line_it_cannot_read(path: Path, line: bytes) -> None:
    write(path, ONE_OF_EACH[:2])
    tail = TraceTail(path)
    tail.new_events()
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(TraceError) as caught:
        tail.new_events()
    assert f"{path}, line 3" in str(caught.value)


# What cannot be read


@pytest.mark.parametrize("cut", [1, 5, 17])
def test_a_last_line_cut_off_by_a_kill_is_left_out(path: Path, cut: int) -> None:
    write(path, ONE_OF_EACH)
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(read_trace(path)) == ONE_OF_EACH[:-1]


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    for missing in (tmp_path, tmp_path / "runs" / "nowhere"):
        with pytest.raises(TraceError) as caught:
            list(read_trace(missing))
        assert str(missing) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b'{"t":0.0,"event":"run_st'], ids=["empty", "half-a-line"])
def test_a_trace_without_an_event_is_named(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        tally(read_trace(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [b"garbage", b"\xff\xfe", b"[1, 2]", b"17", b'{"event": "note", "t": 0.0, "level": "info", "text": ""}'],
)
def test_a_file_that_does_not_begin_as_a_run_is_no_trace(path: Path, line: bytes) -> None:
    path.write_bytes(line + b"\n")
    for read in (lambda: list(read_trace(path)), TraceTail(path).new_events):
        with pytest.raises(TraceError, match="not a Paceline trace") as caught:
            read()
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("schema", [0, 2, None, "1"])
def test_another_schema_is_refused_with_its_number(path: Path, schema: object) -> None:
    first = msgspec.to_builtins(started()) | {"schema": schema}
    path.write_bytes(msgspec.json.encode(first) + b"\n")
    with pytest.raises(TraceError, match=f"schema {schema}, this version reads 1") as caught:
        list(read_trace(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"\xff\xfe",
        b"",
        b'{"event":"note","t":1.0}',
        b'{"event":"note","t":"soon","level":"info","text":""}',
    ],
)
def test_garbage_within_a_trace_is_named_with_its_line(path: Path, line: bytes) -> None:
    write(path, [started(), Note(1.0, "info", "fine")])
    with path.open("ab") as file:
        file.write(line + b"\n")
    write(path, [RunEnded(2.0, "finished")])
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert f"{path}, line 3 is not a trace event" in str(caught.value)
