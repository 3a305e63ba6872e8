"""One address, and whoever comes there: strangers prove that they know the secret before they are heard.

So many may be about to prove it at once, and of one address fewer. When there are more, the oldest one of the
address that has most is cut off: silent strangers cannot keep out a host, which proves itself at once.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from paceline.errors import ConfigError, PacelineError
from paceline.fabric.tls import Seal, let_in
from paceline.fabric.wire import Connection, show_address

STRANGERS = 128
"""So many may be at the door at once."""
STRANGERS_EACH = 16
"""Of one address (IPv6: one network of 64 bits)."""
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
        self._strangers = Strangers()
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
                sock, came_from = self._listener.accept()
            except OSError as error:
                if error.errno in EXHAUSTED:
                    time.sleep(0.1)  # out of descriptors: accept would fail again at once
                    continue
                return
            self._strangers.add(sock, came_from[0])
            threading.Thread(target=self._meet, args=(sock,), daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        try:
            known = let_in(sock, self._secret, self._seal)
        finally:
            self._strangers.remove(sock)
        kept = False
        with contextlib.suppress(OSError, PacelineError):
            kept = known is not None and self._come_in(known)
        if not kept:
            sock.close()


class Strangers:
    """Connections that have not proved anything yet, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._there: dict[socket.socket, str] = {}

    def add(self, sock: socket.socket, address: str) -> None:
        """One more; if there are too many, the oldest is cut off, whose thread then closes it."""
        with self._lock:
            self._there[sock] = _network(address)
            crowded, count = Counter(self._there.values()).most_common(1)[0]
            if count > STRANGERS_EACH or len(self._there) > STRANGERS:
                oldest = next(each for each, network in self._there.items() if network == crowded)
                del self._there[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def remove(self, sock: socket.socket) -> None:
        """It is none any more: it has proved the secret, or failed to."""
        with self._lock:
            self._there.pop(sock, None)


def _network(address: str) -> str:
    """What counts as one address."""
    return ":".join(address.split(":")[:4]) if ":" in address and "." not in address else address


def _listen(address: tuple[str, int]) -> socket.socket:
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family, backlog=STRANGERS)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {show_address(*address)}: {error.strerror or error}. Give an address of this "
            "machine and a free port; port 0 chooses one."
        ) from None
