"""Where other hosts come in, and how they come back after a cut.

Who connects has a few seconds to prove that it knows the secret, and only a few may try at once (see
`listener`); then it names its session. A session that exists is taken up where
it was left: each end tells how many frames it has had, and the rest is sent again.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from paceline.decoding import decode_message
from paceline.errors import ConfigError, NobodyThere, PacelineError, RunError
from paceline.fabric.listener import Listener
from paceline.fabric.presence import Allowance
from paceline.fabric.session import Session
from paceline.fabric.tls import Seal, Trust, go_in
from paceline.fabric.wire import HANDSHAKE_S, Connection, receive_exactly, show_address

LETTER_BYTES = 1 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Between two attempts to connect."""
REFUSED_S = 0.5
"""How long connections are refused where a process has ended; what forwards them may be started anew."""
T = TypeVar("T")


class Enter(msgspec.Struct, frozen=True):
    """Who comes, after it has proved that it may."""

    session: str
    """A random name that only its owner knows."""
    host: str
    """For people."""
    received: int = 0
    workers: int = 0
    """Places it would like to have; 0 if its workers know their ranks."""
    number: int = 0
    """Which host it is, among those of a run whose store lies on several."""
    reach: str = ""
    """Where other hosts reach it, if it can hold a portion of a store."""
    ended: bool = False
    """Whether this only tells that the session is over: whoever held it has died."""


class Entered(msgspec.Struct, frozen=True):
    """What it is told."""

    received: int
    info: bytes = b""
    refused: str = ""
    later: bool = False
    """Whether the same may be granted later."""


class NotYet(RunError):
    """Refused, but only for now."""


class Door:
    """Listens until closed. Knows nothing of what is said inside."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        welcome: Callable[[Enter], tuple[Session, bytes]],
        seal: Seal | None = None,
    ) -> None:
        """`welcome` finds or makes a session, with a first letter for whoever comes; it raises to refuse."""
        self._welcome = welcome
        self._entering = threading.Lock()
        self._listener = Listener(address, secret, self._let_in, seal)
        self.address = self._listener.address

    def close(self) -> None:
        """Nobody comes in any more; who is inside stays."""
        self._listener.close()

    def _let_in(self, sock: Connection) -> bool:
        asked = _receive(sock, Enter)
        with self._entering:  # one at a time: two connections of one session must not meet
            try:
                session, info = self._welcome(asked)
            except PacelineError as error:
                _send(sock, Entered(0, refused=str(error), later=isinstance(error, NotYet)))
                return False
            session.detach()
            _send(sock, Entered(session.received, info))
            session.attach(sock, asked.received)
        return True


def call_patiently(
    address: tuple[str, int],
    secret: bytes,
    asked: Enter,
    patience_s: float,
    over: threading.Event,
    trust: Trust | None = None,
    known: bool = False,
    put_off: Callable[[str], None] = lambda why: None,
) -> tuple[Connection, Entered]:
    """Call again and again, ever less often, until somebody answers or patience is at its end. `known`:
    somebody listened there, so whoever refuses connections now is a host on which that process has ended.
    `put_off` is told every time why that is refused for now."""
    patience, pause = Allowance(patience_s), FIRST_PAUSE_S
    refusals = Allowance(REFUSED_S)
    while True:
        try:
            return call(address, secret, asked, trust)
        except (OSError, RunError) as error:
            where, refused = show_address(*address), isinstance(error, NotYet)
            if refused:
                put_off(str(error))
            if not isinstance(error, ConnectionRefusedError):
                refusals = Allowance(REFUSED_S)
            elif known and refusals.over:
                raise NobodyThere(f"nothing listens at {where} any more") from None
            if patience.left_s < pause or over.wait(pause):
                if refused:
                    raise ConfigError(f"{error} This host has waited for {patience_s:g} s.") from None
                raise RunError(f"no answer from {where} for {patience_s:g} s: {error}") from None
            pause = min(2 * pause, LONGEST_PAUSE_S)


def call(
    address: tuple[str, int], secret: bytes, asked: Enter, trust: Trust | None = None
) -> tuple[Connection, Entered]:
    """Connect, prove, and name the session."""
    sock = socket.create_connection(address, timeout=HANDSHAKE_S)
    try:
        known = go_in(sock, secret, address[0], trust)
        _send(known, asked)
        answer = _receive(known, Entered)
        if answer.later:
            raise NotYet(answer.refused)
        if answer.refused:
            raise ConfigError(answer.refused)
        return known, answer
    except BaseException:
        sock.close()
        raise


def _send(sock: Connection, letter: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(letter)
    sock.sendall(len(data).to_bytes(4, "little") + data)


def _receive(sock: Connection, kind: type[T]) -> T:
    deadline = time.monotonic() + HANDSHAKE_S
    size = int.from_bytes(receive_exactly(sock, 4, deadline), "little")
    if size > LETTER_BYTES:
        raise RunError(f"a first letter of {size} bytes is not ours.")
    return decode_message(receive_exactly(sock, size, deadline), kind=kind)
