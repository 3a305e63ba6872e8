"""Who may talk to a serving doctor: both sides prove that they know the secret, and never send it.

    server -> client   magic, nonce S
    client -> server   nonce C, HMAC(secret, "client" S C)
    server -> client   HMAC(secret, "server" S C)

The lengths are fixed, so nothing that a stranger sends is interpreted. What follows is neither encrypted
nor signed: it is bytes of no meaning, sizes that are checked, and versions.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from pathlib import Path

from paceline.doctor.wire import receive
from paceline.errors import ConfigError, RunError

VARIABLE = "PACELINE_SECRET"
MAGIC = b"PLDOCTR1"
NONCE = 32
LEAST = 16
WITHIN_S = 5.0
"""For the whole handshake, so that a stranger who drips bytes does not stay."""


def find_secret(file: Path | None) -> bytes:
    """From the file, else from the environment."""
    if file is not None:
        try:
            secret, source = file.read_bytes().strip(), str(file)
        except OSError as error:
            raise ConfigError(
                f"cannot read the secret in {file}: {error.strerror}. Check the path."
            ) from None
    else:
        secret, source = os.environ.get(VARIABLE, "").strip().encode(), VARIABLE
    if not secret:
        raise ConfigError(
            f"measuring between hosts needs a secret that both know, and {source} holds none. Make one with "
            f"`openssl rand -hex 32`, give it to both by --secret-file FILE or {VARIABLE}."
        )
    if len(secret) < LEAST:
        raise ConfigError(f"the secret in {source} has {len(secret)} bytes. Take {LEAST} or more.")
    return secret


def admit(connection: socket.socket, secret: bytes) -> bool:
    """The server's side: whether the peer knows the secret."""
    nonce = secrets.token_bytes(NONCE)
    connection.settimeout(WITHIN_S)
    connection.sendall(MAGIC + nonce)
    answer = receive(connection, NONCE + 32, WITHIN_S)
    both = nonce + answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], _proof(secret, b"client", both)):
        return False
    connection.sendall(_proof(secret, b"server", both))
    return True


def introduce(connection: socket.socket, secret: bytes) -> None:
    """The client's side. Raises unless the server knows the secret too."""
    try:
        greeting = receive(connection, len(MAGIC) + NONCE, WITHIN_S)
        if not greeting.startswith(MAGIC):
            raise RunError("what answers there is no doctor. Check the port.")
        own = secrets.token_bytes(NONCE)
        both = greeting[len(MAGIC) :] + own
        connection.sendall(own + _proof(secret, b"client", both))
        answer = receive(connection, 32, WITHIN_S)
    except OSError as error:
        raise RunError(f"the doctor there does not let us in ({error}). Is the secret the same?") from None
    if not hmac.compare_digest(answer, _proof(secret, b"server", both)):
        raise RunError("the doctor there does not know our secret. Is it the same on both hosts?")


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"paceline doctor " + role + nonces, "sha256")
