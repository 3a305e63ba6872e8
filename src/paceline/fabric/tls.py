"""Connections that nobody else can read: TLS 1.3, and who stands at the other end proved by the run's secret.

Whoever listens shows a certificate: the user's own, or one made for this run, whose key never leaves
the process. Who comes need not know it before. The proof of the secret, given inside of TLS, covers the
certificate's hash: somebody in between, who shows another one, gets a proof that is worth nothing
to him, and cannot give one. With a CA of the user's (`Trust.ca`) the certificate is checked as well.

A door that speaks TLS says so first, in the clear, so that who does not expect it, or expects it in
vain, can say what is wrong instead of waiting. What is said there decides nothing.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Self, cast

import msgspec

from paceline.errors import ConfigError, RunError
from paceline.fabric.wire import HANDSHAKE_S, MAGIC, TLS_MAGIC, Connection, admit, enter, receive_exactly

CHUNK = 1 << 18
"""So many bytes are sealed, or opened, at a time."""
MAKE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout - -out - "
    "-days 3650 -subj /CN=paceline -config /dev/null"
)
"""A key and a certificate on standard output. Nobody looks at its dates or name: its hash is what counts."""


class Trust(msgspec.Struct, frozen=True):
    """That who comes speaks TLS only, and what it believes besides the secret."""

    ca: str | None = None
    """File with the certificates that may have signed the other end's, which then has to be for its address,
    and in date; None: whoever knows the secret may show any."""
    or_plain: bool = False
    """Whether who answers may speak without TLS: on a way that never leaves this machine."""


class Seal:
    """What a door shows to those who come."""

    def __init__(self, certificate: str | None = None, key: str | None = None) -> None:
        """The files of a certificate (with its chain) and its key; without, both are made."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0  # a connection is never resumed, a session is
        if certificate is None:
            pem = _make()
            _load_from_memory(self.context, pem)
        else:
            pem = _load_files(self.context, certificate, key)
        self.hash = _hash(ssl.PEM_cert_to_DER_cert(_first_certificate(pem)))


class SealedSocket:
    """A connection under TLS. One thread may read while another one writes.

    OpenSSL's object must not be used by two threads at once: it works in memory only, under a lock, and
    the bytes travel outside of it, so that who waits for the network keeps nobody from sealing or opening.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, name: str | None = None) -> None:
        """`name`: whom we call; None at the end that was called."""
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, name is None, name)
        self._lock = threading.Lock()
        self._arrived = memoryview(bytearray(CHUNK))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def shake_hands(self, deadline: float) -> None:
        """The handshake of TLS, within its time."""
        while not self._step():
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            if not self._receive():
                raise RunError("the connection ended during the handshake of TLS.")

    def _step(self) -> bool:
        """Whether it is done; what it wants to say, were it only what it does not like, is said."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self._flush()
        return True

    def peer_hash(self) -> bytes:
        """The hash of the certificate that we were shown."""
        return _hash(self._tls.getpeercert(binary_form=True) or b"")

    # -- what a socket does -------------------------------------------------------------------

    def settimeout(self, value: float | None, /) -> None:
        """For everything that waits from now on."""
        self._sock.settimeout(value)

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """Of the socket underneath."""
        self._sock.setsockopt(level, option, value)

    def shutdown(self, how: int, /) -> None:
        """Cut it, whoever is reading or writing."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """Without a word of goodbye: frames are numbered, so an end too soon is noticed."""
        self._sock.close()

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """At most so many bytes; none at the end."""
        data = bytearray(size)
        return bytes(data[: self.recv_into(memoryview(data), size)])

    def recv_into(self, memory: memoryview, size: int, flags: int = 0, /) -> int:
        """What has arrived, up to so many bytes; 0 at the end."""
        while (count := self._open(memory[:size])) == 0:
            if not self._receive():
                break
        return count

    def sendall(self, data: bytes | bytearray | memoryview, flags: int = 0, /) -> None:
        """All of it."""
        self.sendmsg([data])

    def sendmsg(
        self,
        buffers: Sequence[bytes | bytearray | memoryview],
        ancillary: Iterable[tuple[int, int, bytes]] = (),
        flags: int = 0,
        /,
    ) -> int:
        """All of them; or nothing, if it must not wait: what was sealed cannot be taken back."""
        if flags & socket.MSG_DONTWAIT:
            return 0
        for buffer in buffers:
            for start in range(0, len(buffer), CHUNK):
                self._seal(memoryview(buffer)[start : start + CHUNK])
                if self._outgoing.pending >= CHUNK:
                    self._flush()
        self._flush()
        return sum(map(len, buffers))

    # -- in memory, under the lock; on the network, outside -----------------------------------

    def _receive(self) -> bool:
        count = self._sock.recv_into(self._arrived)
        with self._lock:
            self._incoming.write(self._arrived[:count])
        return count > 0

    def _open(self, memory: memoryview) -> int:
        count = 0
        with self._lock:
            try:
                while count < len(memory):
                    count += cast(int, self._tls.read(len(memory) - count, cast(bytearray, memory[count:])))
            except ssl.SSLWantReadError:
                pass
        return count

    def _seal(self, data: memoryview) -> None:
        with self._lock:
            while data:
                data = data[self._tls.write(data) :]

    def _flush(self) -> None:
        with self._lock:
            sealed = self._outgoing.read()
        if sealed:
            self._sock.sendall(sealed)


def let_in(sock: socket.socket, secret: bytes, seal: Seal | None) -> Connection | None:
    """The listening side: whoever knows the secret, over TLS if there is a seal; None: somebody else."""
    if seal is None:
        return sock if admit(sock, secret) else None
    try:
        sock.settimeout(HANDSHAKE_S)
        sock.sendall(TLS_MAGIC)
        sealed = SealedSocket(sock, seal.context)
        sealed.shake_hands(time.monotonic() + HANDSHAKE_S)
    except (OSError, RunError):
        return None
    return sealed if admit(sealed, secret, TLS_MAGIC, seal.hash) else None


def go_in(sock: socket.socket, secret: bytes, host: str, trust: Trust | None) -> Connection:
    """The connecting side: prove the secret, over TLS if that is asked for, and be shown the proof."""
    if trust is None:
        enter(sock, secret)
        return sock
    deadline = time.monotonic() + HANDSHAKE_S
    greeting = receive_exactly(sock, len(TLS_MAGIC), deadline)
    if greeting == MAGIC and trust.or_plain:
        enter(sock, secret, greeting=greeting)
        return sock
    if greeting == MAGIC:
        raise ConfigError("the run there does not use TLS. Start it with --tls, or add --plain here, too.")
    if greeting != TLS_MAGIC:
        raise ConfigError("the program that listens there is not this version of Paceline.")
    sealed = SealedSocket(sock, _context_of_guest(trust), host)
    try:
        sealed.shake_hands(deadline)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"the certificate that {host} shows is refused: {error.verify_message.rstrip('.')}. "
            "Is --tls-ca the one that signed it, and is it made out to this address?"
        ) from None
    enter(sealed, secret, TLS_MAGIC, sealed.peer_hash())
    return sealed


def _context_of_guest(trust: Trust) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if trust.ca is None:  # its hash is part of the proof, which is more than a name and a date
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    try:
        context.load_verify_locations(trust.ca)
    except OSError as error:
        raise ConfigError(f"cannot use --tls-ca {trust.ca}: {_reason(error)}.") from None
    return context


def _make() -> str:
    try:
        made = subprocess.run(
            MAKE.split(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"no certificate could be made with the command openssl: {error}. Install it (every "
            "distribution has a package openssl), bring your own (--tls-cert FILE --tls-key FILE), or leave "
            "everything unencrypted: --plain."
        ) from None
    return made.stdout


def _load_from_memory(context: ssl.SSLContext, pem: str) -> None:
    """Python loads keys from files only; this one has no name, and is on no disk."""
    fd = os.memfd_create("paceline-tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _load_files(context: ssl.SSLContext, certificate: str, key: str | None) -> str:
    def no_password() -> str:
        raise ConfigError(f"the key of {certificate} is under a password; give one that is not.")

    try:
        context.load_cert_chain(certificate, key, no_password)
        with open(certificate) as file:
            return file.read()
    except OSError as error:
        raise ConfigError(
            f"cannot use the certificate {certificate} with the key {key or certificate}: {_reason(error)}."
        ) from None


def _first_certificate(pem: str) -> str:
    """The one that is shown; a chain may follow."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    return pem[pem.index(begin) : pem.index(end) + len(end)]


def _hash(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def _reason(error: OSError) -> str:
    """What OpenSSL, or the system, says about a file."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(error.strerror or error)
