"""A host's part in a run whose store is elsewhere: ask for places, then start workers for them."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.config import RunConfig
from paceline.decoding import decode_message
from paceline.engines.control import Guest
from paceline.fabric.door import Enter, call_patiently
from paceline.fabric.tls import Trust
from paceline.fabric.wire import check_secret, parse_address
from paceline.runtime.hosts.death_notice import tell_ended


def enrol(
    address: str,
    secret: str,
    workers: int,
    runs: Path,
    wait_s: float,
    trust: Trust | None = None,
    put_off: Callable[[str], None] = lambda why: None,
) -> tuple[RunConfig, Guest]:
    """Ask the run for places, and for what is to be run; it gets a folder here for its logs. `put_off` is
    told why there is no place so far."""
    where, session = parse_address(address), secrets.token_hex(16)
    hello = Enter(session, socket.gethostname(), workers=workers)
    key, over = check_secret(secret), threading.Event()
    sock, entered = call_patiently(where, key, hello, wait_s, over, trust, put_off=put_off)
    sock.close()
    info, ranks = decode_message(entered.info, kind=tuple[bytes, tuple[int, ...]])
    config = decode_message(info, kind=RunConfig)
    folder = runs / config.run
    folder.mkdir(parents=True, exist_ok=True)
    spoken = Trust(trust.ca) if trust is not None and config.tls else None
    return msgspec.structs.replace(config, folder=str(folder)), Guest(where, session, ranks, spoken)


def give_back(guest: Guest, secret: str, trust: Trust | None = None) -> None:
    """Nothing was started for these places: others may have them at once."""
    hello = Enter(guest.session, socket.gethostname())
    tell_ended(guest.address, check_secret(secret), hello, guest.trust or trust)
