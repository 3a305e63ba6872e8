"""Messages arrive whole or not at all; what is not ours is refused, not believed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding import MessageDecoder
from paceline.errors import RunError
from paceline.fabric import channel as module
from paceline.fabric.channel import LARGE, Channel
from paceline.runtime.messages import workers as m


class Text(msgspec.Struct, tag=True):
    text: str


class Number(msgspec.Struct, tag=True):
    number: int


decoder: MessageDecoder[Text | Number] = MessageDecoder(Text | Number)
Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = (Channel(end) for end in Channel.pair())
    yield one, other
    one.close()
    other.close()


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_messages_keep_their_borders_and_their_order(pair: Pair) -> None:
    one, other = pair
    for number in range(20):
        one.send(Number(number))
        one.send(Text("x" * number * 100))
    for number in range(20):
        assert other.receive(decoder) == (Number(number), [])
        assert other.receive(decoder) == (Text("x" * number * 100), [])


@pytest.mark.parametrize("size", [65_500, 65_536, 200_000, 5_000_000])
def test_a_large_message_arrives_whole_with_its_descriptors(pair: Pair, size: int) -> None:
    one, other = pair
    before = open_fds()
    read, write = os.pipe()
    one.send(Text("y" * size), (write,))
    received = other.receive(decoder)
    assert received is not None
    message, fds = received
    assert message == Text("y" * size)
    os.write(fds[0], b"through")
    assert os.read(read, 10) == b"through"
    for fd in (read, write, *fds):
        os.close(fd)
    assert open_fds() == before


def test_more_than_is_sensible_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair
    monkeypatch.setattr(module, "LARGEST_BYTES", 100_000)
    before = open_fds()
    one.send(Text("z" * 200_000), (0,))
    with pytest.raises(RunError, match="at most 100000 are accepted"):
        other.receive(decoder)
    assert open_fds() == before, "what came with it was not closed"


def test_the_end_of_the_other_side_is_none(pair: Pair) -> None:
    one, other = pair
    one.send(Number(1))
    one.close()
    assert other.receive(decoder) == (Number(1), [])
    assert other.receive(decoder) is None


@pytest.mark.parametrize("data", [b"\xff", LARGE, pickle.dumps({"a": 1}), b"\x00" * 300_000, b"{}"])
def test_what_is_not_ours_is_refused(pair: Pair, data: bytes) -> None:
    one, other = pair
    one._sock.send(data)
    with pytest.raises(RunError, match="not ours"):
        other.receive(decoder)


@given(st.binary(min_size=1, max_size=300))
def test_random_bytes_never_do_more_than_raise(data: bytes) -> None:
    one, other = (Channel(end) for end in Channel.pair())
    one._sock.send(data)
    try:
        received = other.receive(m.worker_decoder)
        assert received is not None
    except RunError:
        pass
    one.close()
    other.close()
