"""The processes that stand between workers somebody else started: the store, or a host's relay.

The order comes on standard input (nobody can read it in the list of processes), the first line on
standard output says `ready`, or `error` and why.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from pathlib import Path

import msgspec

from paceline.decoding import decode_json
from paceline.engines.meeting import MeetingPoint, StoreOrder
from paceline.errors import ConfigError, PacelineError
from paceline.fabric.door import Enter
from paceline.fabric.neighbours import wait_for_neighbours
from paceline.fabric.stop_signals import die_with, heed_stop
from paceline.fabric.wire import check_secret, parse_address


def main() -> None:
    """Obey one order."""
    kind, order = sys.argv[1], sys.stdin.buffer.read()
    try:
        status = _store(order) if kind == "store" else _relay(order)
    except PacelineError as error:
        _say(f"error {error}")
        status = 2 if isinstance(error, ConfigError) else 1
    sys.exit(status)


def _store(order: bytes) -> int:
    from paceline.runtime.serve import serve_strangers

    request = decode_json(order, kind=StoreOrder)
    folder = request.config.path
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():  # else it stands there as it was asked for
        (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(request.config)))
    stop = _stop_signal(request.holder)

    def ready(address: str) -> socket.socket:
        listener = wait_for_neighbours(MeetingPoint(address, request.secret).name)
        if listener is None:
            raise ConfigError(f"another store of this run is on this host already, at {address}.")
        _say(f"ready {address}", folder / "logs" / "store.log")
        return listener

    if request.config.mesh is not None:
        from paceline.parallel.conductor.strangers import conduct_strangers

        return conduct_strangers(request.config, ready, stop)
    return serve_strangers(request.config, request.secret, ready, stop)


def _stop_signal(holder: int | None) -> int:
    """Becomes readable when somebody asks for the end by a signal, or when who holds us dies."""
    stop = os.eventfd(0, os.EFD_CLOEXEC)
    heed_stop(stop)
    if holder is not None:
        die_with(holder, signal.SIGTERM)
    return stop


def _relay(order: bytes) -> int:
    from paceline.runtime.hosts.death_notice import DeathNotice
    from paceline.runtime.hosts.relay import Relay
    from paceline.runtime.portions.share import HostShare

    meeting = decode_json(order, kind=MeetingPoint)
    listener = wait_for_neighbours(meeting.name)
    if listener is None:  # a neighbour was faster
        _say("ready")
        return 0
    address, secret = parse_address(meeting.address), check_secret(meeting.secret)
    hello = Enter(secrets.token_hex(16), socket.gethostname())
    with DeathNotice(address, secret, hello, meeting.trust):
        sharing = HostShare(address, secret, sealed=meeting.trust is not None) if meeting.portions else None
        known = hello if sharing is None else msgspec.structs.replace(hello, reach=sharing.reach)
        relay = Relay(address, secret, known, [], listener, trust=meeting.trust, sharing=sharing)
        _say("ready", Path(os.devnull))
        relay.run()
    return 0


def _say(line: str, log: Path | None = None) -> None:
    """The first and last word on standard output; from then on it is the log."""
    print(line, flush=True)
    if log is not None:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)


if __name__ == "__main__":
    main()
