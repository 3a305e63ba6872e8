"""The other side of a door: keeps a session connected, through cuts, until it is hopeless."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from paceline.errors import ConfigError, RunError
from paceline.fabric.door import Enter, call_patiently
from paceline.fabric.session import Session, Sink
from paceline.fabric.tls import Trust

PATIENCE_S = 60.0
"""How long a host tries to come back."""


class Dialer:
    """Connects a session, and connects it again."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        hello: Enter,
        sink: Sink,
        gave_up: Callable[[str], None],
        patience_s: float = PATIENCE_S,
        trust: Trust | None = None,
    ) -> None:
        self._address, self._secret, self._hello = address, secret, hello
        self._gave_up, self._patience_s, self._trust = gave_up, patience_s, trust
        self._over = threading.Event()
        self.session = Session(sink, self._broken)

    def open(self) -> bytes:
        """The first connection; what the other side tells first."""
        return self._connect()

    def close(self, drain_s: float = 0.0) -> None:
        """Hang up, after what was said has arrived, if it does in time."""
        if drain_s:
            self.session.drain(drain_s)
        self._over.set()
        self.session.close()

    def _broken(self, why: str, closed: bool) -> None:
        threading.Thread(target=self._come_back, args=(why,), daemon=True).start()

    def _come_back(self, why: str) -> None:
        try:
            if self.session.impossible:
                raise RunError(f"the other end said what cannot be: {self.session.impossible}")
            self._connect(known=True)
        except (ConfigError, RunError) as error:
            if not self._over.is_set():
                self._gave_up(f"{error} ({why})")

    def _connect(self, known: bool = False) -> bytes:
        self.session.detach()
        hello = msgspec.structs.replace(self._hello, received=self.session.received)
        sock, entered = call_patiently(
            self._address, self._secret, hello, self._patience_s, self._over, self._trust, known
        )
        self.session.attach(sock, entered.received)
        return entered.info
