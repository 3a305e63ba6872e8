"""One address, and whoever comes there: strangers prove that they know the secret before they are heard."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from paceline.errors import ConfigError, PacelineError
from paceline.fabric.tls import Seal, let_in
from paceline.fabric.wire import Connection, show_address

STRANGERS = 16
"""So many may be at the door at once; further ones are turned away."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Listens until closed; everybody is met in a thread of its own."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        come_in: Callable[[Connection], bool],
        seal: Seal | None = None,
    ) -> None:
        """`come_in` is given who has proved the secret, and says whether it keeps the connection."""
        self._secret, self._seal, self._come_in = secret, seal, come_in
        self._listener = _listen(address)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._thread = threading.Thread(target=self._accept, name="paceline-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody comes in any more; who is inside stays."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if error.errno in EXHAUSTED:
                    time.sleep(0.1)  # out of descriptors: accept would fail again at once
                    continue
                return
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(sock,), daemon=True).start()
            else:
                sock.close()

    def _meet(self, sock: socket.socket) -> None:
        try:
            known = let_in(sock, self._secret, self._seal)
        finally:
            self._strangers.release()
        kept = False
        with contextlib.suppress(OSError, PacelineError, msgspec.DecodeError):
            kept = known is not None and self._come_in(known)
        if not kept:
            sock.close()


def _listen(address: tuple[str, int]) -> socket.socket:
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family, backlog=STRANGERS)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {show_address(*address)}: {error.strerror or error}. "
            "Name an address of this machine and a port that nobody uses; port 0 takes a free one."
        ) from None
