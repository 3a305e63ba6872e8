"""A session outlives its connections: every frame arrives once, in order, in the right memory."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, RunError
from paceline.fabric.dialer import Dialer
from paceline.fabric.door import Door, Enter
from paceline.fabric.session import Session
from paceline.fabric.wire import ACK, CONTROL, DATA, HEADER, PIECE_BYTES, check_secret, read_header
from support.runs import wait_until
from support.sessions import SECRET, Ends, Notebook

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = Ends(5 * PIECE_BYTES // 2)
    yield both
    both.close()


def test_memory_arrives_before_the_message_that_speaks_of_it(ends: Ends) -> None:
    ends.check_a_push()


def test_a_small_message_overtakes_the_large_tensor_of_another_lane(ends: Ends) -> None:
    data = memoryview(bytes(len(ends.here.memory[1])))
    for _ in range(40):
        ends.dialer.session.send_memory(1, 0, data, 0, len(data))
    ends.dialer.session.send(1, b"large")
    ends.dialer.session.send(2, b"small")
    ends.here.wait(2)
    assert [text for _, text in ends.here.messages] == [b"small", b"large"]


@settings(max_examples=15, deadline=None)
@given(
    script=st.lists(
        st.sampled_from(["here", "there", "cut", "tensor"]) | st.just("there"), min_size=4, max_size=40
    )
)
def test_every_frame_arrives_exactly_once_and_in_order_whatever_is_cut(script: list[str]) -> None:
    with closing(Ends(3 * PIECE_BYTES)) as ends:
        ends.check_a_conversation(script)


def test_a_caller_with_a_wrong_secret_is_refused_and_the_others_go_on(ends: Ends) -> None:
    wrong = Dialer(ends.door.address, b"another secret, long enough", Enter("x", "y"), Notebook(8), print, 5)
    with pytest.raises(ConfigError, match="secret is wrong"):
        wrong.open()
    wrong.close()
    ends.dialer.session.send(0, b"still here")
    ends.here.wait(1)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(64), b"\xff" * 4096, b""])
def test_garbage_is_shown_the_door_before_anything_is_decoded(ends: Ends, garbage: bytes) -> None:
    with socket.create_connection(ends.door.address, timeout=10) as stranger:
        heard = b""
        with contextlib.suppress(OSError):  # a reset is an answer, too
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            while part := stranger.recv(4096):
                heard += part
    assert len(heard) <= 16 + 32 + 32  # the greeting and a refusal, and not one word more
    ends.dialer.session.send(0, b"unharmed")
    ends.here.wait(1)


def test_slow_strangers_do_not_keep_others_out(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.fabric.wire.HANDSHAKE_S", 0.5)
    strangers = [socket.create_connection(ends.door.address, timeout=10) for _ in range(40)]
    try:
        ends.cut()
        ends.dialer.session.send(0, b"back again")
        ends.here.wait(1)
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize(("kind", "length"), [(DATA, PIECE_BYTES + 1), (CONTROL, 1 << 31), (ACK, 1), (9, 0)])
def test_a_length_that_cannot_be_is_refused_before_anything_is_allocated(kind: int, length: int) -> None:
    with pytest.raises(RunError, match="not ours"):
        read_header(HEADER.pack(kind, 0, 0, length, 0, 0))


def test_a_piece_for_memory_that_was_not_agreed_on_ends_the_session(ends: Ends) -> None:
    """It would be sent again after every reconnection, for ever."""
    size = len(ends.here.memory[1])
    ends.dialer.session.send_memory(1, 0, memoryview(bytes(size + 8)), size, size + 8)
    ends.dialer.session.send(1, b"never heard")
    wait_until(lambda: ends.session.impossible != "", "it is refused")
    assert not ends.dialer.session.drain(0.5)
    assert ends.here.messages == []


def test_who_finds_nobody_gives_up_and_says_where() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()[:2]
    dialer = Dialer(address, SECRET, Enter("x", "y"), Notebook(8), print, 0.3)
    with pytest.raises(RunError, match=f"no answer from 127.0.0.1:{address[1]}"):
        dialer.open()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}.*in use"):
            Door(("127.0.0.1", port), SECRET, lambda asked: (Session(Notebook(8), print), b""))


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 5 characters"):
        check_secret("short")


def test_who_sends_never_waits_for_the_other_end(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's loop sends: it would stand still for all when one host does not read."""
    awake = threading.Event()
    place = ends.here.place

    def sleepy(lane: int, what: int, offset: int, length: int) -> memoryview:
        assert awake.wait(30)
        return place(lane, what, offset, length)

    monkeypatch.setattr(ends.here, "place", sleepy)
    data = memoryview(bytes(len(ends.here.memory[1])))
    for _ in range(20):  # far more than the kernel's buffers hold
        ends.dialer.session.send_memory(1, 0, data, 0, len(data))
        ends.dialer.session.send(1, b"more")
    assert ends.here.messages == []
    awake.set()
    ends.here.wait(20)


@pytest.mark.parametrize("seed", range(3))
def test_many_who_send_at_once_are_all_heard_once_and_in_their_order(ends: Ends, seed: int) -> None:
    random = Random(seed)
    data = memoryview(bytes(len(ends.here.memory[1])))

    def speak(lane: int) -> None:
        for number in range(100):
            if number % 20 == lane:
                ends.dialer.session.send_memory(lane, 0, data, 0, len(data))
            ends.dialer.session.send(lane, b"%d" % number)

    speakers = [threading.Thread(target=speak, args=(lane,)) for lane in range(4)]
    for speaker in speakers:
        speaker.start()
    for _ in range(5):
        time.sleep(random.uniform(0, 0.02))
        ends.cut()
    for speaker in speakers:
        speaker.join()
    ends.here.wait(400)
    for lane in range(4):
        heard = [int(text) for spoken, text in ends.here.messages if spoken == lane]
        assert heard == list(range(100))
