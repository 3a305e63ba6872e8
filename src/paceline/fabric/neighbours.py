"""Processes of one host that did not start each other, and find each other by a name without a file.

An abstract Unix socket lives in the host's network namespace and vanishes with its owner. Both
ends look at the other's user: a name can be taken by anybody, an identity cannot.
"""

from __future__ import annotations

import os
import socket
import struct

from paceline.errors import RunError

CREDENTIALS = struct.Struct("3i")


def wait_for_neighbours(name: str) -> socket.socket | None:
    """Listen under a name; None when somebody does already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener.bind(f"\0paceline-{name}")
    except OSError:
        listener.close()
        return None
    listener.listen(128)
    return listener


def take_neighbour(listener: socket.socket) -> tuple[socket.socket, int] | None:
    """The next process that came, and its pid; None when it belongs to somebody else."""
    sock, _ = listener.accept()
    pid, user = _who(sock)
    if user != os.getuid():
        sock.close()
        return None
    return sock, pid


def find_neighbour(name: str) -> socket.socket | None:
    """Connect to whoever listens under a name; None when nobody does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.connect(f"\0paceline-{name}")
    except ConnectionRefusedError:
        sock.close()
        return None
    if _who(sock)[1] != os.getuid():
        sock.close()
        raise RunError(
            f"another user of this host listens under the name {name!r}; the run does not trust it."
        )
    return sock


def _who(sock: socket.socket) -> tuple[int, int]:
    pid, user, _ = CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    )
    return pid, user
