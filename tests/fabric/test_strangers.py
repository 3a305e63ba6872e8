"""Connections that prove nothing lock nobody out; and a reset is not taken for a farewell."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from paceline.fabric.dialer import Dialer
from paceline.fabric.door import Door, Enter
from paceline.fabric.listener import STRANGERS, STRANGERS_EACH, Strangers
from paceline.fabric.session import Session
from support.runs import wait_until
from support.sessions import SECRET, Notebook

pytestmark = pytest.mark.timeout(60)


@contextlib.contextmanager
def flood(address: tuple[str, int]) -> Iterator[None]:
    """Far more silent connections than there are places, and one more every 20 ms, until it is over."""
    silent = [socket.create_connection(address) for _ in range(2 * STRANGERS_EACH)]
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.02):
            silent.append(socket.create_connection(address))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for each in silent:
            each.close()


def test_a_host_comes_in_while_strangers_of_its_own_address_flood_the_door() -> None:
    session = Session(Notebook(8), lambda why, closed: None)
    door = Door(("127.0.0.1", 0), SECRET, lambda asked: (session, b"letter"))
    with flood(door.address):
        dialer = Dialer(door.address, SECRET, Enter("one", "test"), Notebook(8), print, 4)
        assert dialer.open() == b"letter"
        dialer.close()
    door.close()
    session.close()


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def is_cut_off(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_oldest_of_the_crowded_address_goes_first_and_nobody_else() -> None:
    strangers, ends = Strangers(), []
    with contextlib.ExitStack() as opened:

        def come(address: str) -> None:
            here, there = (opened.enter_context(each) for each in pair())
            strangers.add(here, address)
            ends.append(there)

        come("10.0.0.7")
        for _ in range(STRANGERS_EACH + 5):
            come("10.0.0.8")
        assert [is_cut_off(end) for end in ends] == [False, *[True] * 5, *[False] * STRANGERS_EACH]
        for number in range(STRANGERS - 8):
            come(f"10.0.1.{number}")
        assert not is_cut_off(ends[0]), "there is an address with more"


def test_addresses_of_one_ipv6_network_count_as_one() -> None:
    strangers = Strangers()
    with contextlib.ExitStack() as opened:
        ends = []
        for number in range(STRANGERS_EACH + 1):
            here, there = (opened.enter_context(each) for each in pair())
            strangers.add(here, f"2001:db8:1:2:0:0:0:{number:x}")
            ends.append(there)
        assert [is_cut_off(end) for end in ends] == [True] + [False] * STRANGERS_EACH


@pytest.mark.parametrize("reset", [False, True])
def test_only_an_end_in_good_order_is_taken_for_one(reset: bool) -> None:
    """The rest gets the whole patience, a reset like a silence."""
    told: list[bool] = []
    session = Session(Notebook(8), lambda why, closed: told.append(closed))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    session.attach(here, 0)
    if reset:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()
    wait_until(lambda: bool(told), "the end is noticed", 20)
    session.close()
    assert told == [not reset]
