"""Ports for tests that have to name one before they listen at it."""

from __future__ import annotations

import random
import socket

NOT_HANDED_OUT = range(20_000, 30_000)
"""Below those that the kernel gives to whoever asks for any: nobody else takes one meanwhile."""


def free_port() -> int:
    """A port of loopback that nobody uses."""
    while True:
        port = random.SystemRandom().choice(NOT_HANDED_OUT)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
