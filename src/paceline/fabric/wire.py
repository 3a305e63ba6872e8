"""What two hosts say to each other before and around everything else: proof of the secret, and frames.

Whoever connects proves that it knows the run's secret, and is shown that the other end does, by a
challenge of fixed length each way (HMAC-SHA256 over both ends' random numbers). Until then nothing
is decoded and nothing is allocated; who is too slow or wrong is shown the door.
After it come frames: a header of fixed size whose lengths are checked before a byte of the rest
is read, what it announces, and what is missing to a whole cache line. The secret proves who speaks; it
does not hide what is said: for that there is TLS (`tls`), inside of which the proof covers the
certificate as well.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, Self

from paceline.errors import ConfigError, RunError

MAGIC = b"paceline-wire-3\n"
TLS_MAGIC = b"paceline-tls--3\n"
NONCE = 32
PROOF = 32
REFUSED = bytes(PROOF)
"""In place of a proof: so that a wrong secret can be told from a link that broke."""
HANDSHAKE_S = 5.0
"""How long a stranger may take to prove that it is none."""
PIECE_BYTES = 1 << 20
"""Tensors travel in pieces of this size, so that nothing small waits behind something large."""
CONTROL_BYTES = 8 << 20
"""The largest message that is not a tensor's piece."""
SHORTEST_SECRET = 16

CONTROL, DATA, ACK = 1, 2, 3
LONGEST = {CONTROL: CONTROL_BYTES, DATA: PIECE_BYTES, ACK: 0}
ALIGNMENT = 64
"""Every frame is filled up to a multiple of this: the kernel copies two to three times as fast between
addresses that are alike within a cache line, and a header of another length would shift all that follows."""
HEADER = struct.Struct("<BBHIQQ40x")


class Connection(Protocol):
    """A socket, or what stands in its place under TLS."""

    def __enter__(self) -> Self:
        """Closed at the end."""

    def __exit__(self, *why: object) -> None:
        """Closed."""

    def settimeout(self, value: float | None, /) -> None:
        """For everything that waits from now on."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """Of the socket, or the one underneath."""

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """At most so many bytes; none at the end."""

    def recv_into(self, memory: memoryview, size: int, flags: int = 0, /) -> int:
        """At most so many bytes, or exactly; 0 at the end."""

    def sendall(self, data: bytes | bytearray | memoryview, flags: int = 0, /) -> None:
        """All of it."""

    def sendmsg(
        self,
        buffers: Sequence[bytes | bytearray | memoryview],
        ancillary: Iterable[tuple[int, int, bytes]] = (),
        flags: int = 0,
        /,
    ) -> int:
        """How many bytes of them were sent."""

    def shutdown(self, how: int, /) -> None:
        """Cut it."""

    def close(self) -> None:
        """The end."""


class Header(NamedTuple):
    """What stands before every frame."""

    kind: int
    what: int
    """Which memory a piece belongs to; who speaks, in a message."""
    lane: int
    """The worker it concerns, as its host counts them."""
    length: int
    offset: int
    ack: int
    """How many numbered frames the sender has received so far."""


def new_secret() -> str:
    """A secret nobody guesses."""
    return secrets.token_hex(32)


def check_secret(secret: str) -> bytes:
    """The secret as key material; a short one is refused."""
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"the run's secret has {len(secret)} characters; at least {SHORTEST_SECRET} are needed. "
            "Make one with: paceline secret --out FILE"
        )
    return secret.encode()


def read_header(data: bytes | memoryview) -> Header:
    """Take a header apart; whatever does not fit is refused before anything is read or allocated."""
    header = Header(*HEADER.unpack(data))
    longest = LONGEST.get(header.kind)
    if longest is None or header.length > longest:
        raise RunError(f"a frame of kind {header.kind} and {header.length} bytes is not ours.")
    return header


def fill_up(length: int) -> int:
    """How many bytes follow the content of a frame."""
    return -length % ALIGNMENT


def admit(sock: Connection, secret: bytes, magic: bytes = MAGIC, binding: bytes = b"") -> bool:
    """The listening side of the handshake; whether the other end knows the secret. `magic`: for what;
    `binding`: what both have to see alike besides."""
    deadline = time.monotonic() + HANDSHAKE_S
    mine = os.urandom(NONCE)
    try:
        sock.settimeout(HANDSHAKE_S)
        sock.sendall(magic + mine)
        answer = receive_exactly(sock, NONCE + PROOF, deadline)
        theirs, proof = answer[:NONCE], answer[NONCE:]
        if not hmac.compare_digest(proof, _proof(secret, magic + b"guest", mine, theirs + binding)):
            sock.sendall(REFUSED)
            return False
        sock.sendall(_proof(secret, magic + b"house", mine, theirs + binding))
    except (OSError, RunError):
        return False
    return True


def enter(
    sock: Connection, secret: bytes, magic: bytes = MAGIC, binding: bytes = b"", greeting: bytes = b""
) -> None:
    """The connecting side of the handshake; `greeting`: if it has been heard already."""
    deadline = time.monotonic() + HANDSHAKE_S
    sock.settimeout(HANDSHAKE_S)
    greeting = greeting or receive_exactly(sock, len(magic), deadline)
    if greeting == TLS_MAGIC != magic:
        raise ConfigError("the run there speaks TLS only. Add --tls, or leave --plain out.")
    if greeting != magic:
        raise ConfigError("the program that listens there is not this version of Paceline.")
    theirs, mine = receive_exactly(sock, NONCE, deadline), os.urandom(NONCE)
    sock.sendall(mine + _proof(secret, magic + b"guest", theirs, mine + binding))
    proof = receive_exactly(sock, PROOF, deadline)
    if proof == REFUSED:
        between = ", or something in between shows another certificate" if binding else ""
        raise ConfigError(f"we were refused: the secret is wrong{between}. Both ends have to know the same.")
    if not hmac.compare_digest(proof, _proof(secret, magic + b"house", theirs, mine + binding)):
        raise ConfigError("the other end does not know our secret, so it is not our run.")


def receive_exactly(sock: Connection, size: int, deadline: float) -> bytes:
    """So many bytes before the deadline, however slowly they are fed."""
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RunError(f"{len(data)} of {size} bytes within {HANDSHAKE_S:g} s.")
        sock.settimeout(left)
        part = sock.recv(size - len(data))
        if not part:
            raise RunError("the connection ended during the handshake.")
        data += part
    return data


def _proof(secret: bytes, side: bytes, house: bytes, guest: bytes) -> bytes:
    return hmac.digest(secret, side + house + guest, hashlib.sha256)


def parse_address(text: str, default_port: int = 0) -> tuple[str, int]:
    """`host:port`, `[v6]:port`, or a host alone."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, str(default_port)
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"an address is HOST or HOST:PORT, got {text!r}. For instance 10.0.0.5:29600.")
    return host.strip("[]"), int(port)


def show_address(host: str, port: int) -> str:
    """The address as people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
