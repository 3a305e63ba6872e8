"""What can be told of another host without a counterpart there."""

from __future__ import annotations

import socket
import time

from paceline.doctor.findings import Finding
from paceline.doctor.wire import address_of

_WITHIN_S = 3.0


def check_host(text: str) -> Finding:
    """Does its name resolve, and does it answer? A refused connection is an answer too."""
    host, port = address_of(text)
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        advice = f"Check the spelling, or add a line 'ADDRESS {host}' to /etc/hosts."
        return Finding(f"host {text}", "problem", f"does not resolve: {error.strerror}", advice)
    with socket.socket(family, kind) as connection:
        connection.settimeout(_WITHIN_S)
        start = time.perf_counter()
        refused = _refused(connection, target)
        seconds = time.perf_counter() - start
    if refused is True and text.strip("[]") != host:  # a port of its own was asked for
        advice = "The host is there, but nothing listens on this port."
        return Finding(f"host {text}", "problem", f"{target[0]} refuses port {port}", advice)
    return _judge(text, str(target[0]), refused, seconds)


def _refused(connection: socket.socket, target: tuple[object, ...]) -> bool | str:
    """Whether the host refused; a text says why there was no answer at all."""
    try:
        connection.connect(target)
    except ConnectionRefusedError:
        return True
    except TimeoutError:
        return f"no answer within {_WITHIN_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return False


def _judge(text: str, address: str, refused: bool | str, seconds: float) -> Finding:
    if isinstance(refused, str):
        advice = "It is down, unreachable from here, or a firewall drops what we send. Try it from that side."
        return Finding(f"host {text}", "problem", f"{address}: {refused}", advice)
    seen = f"{address} answers within {seconds * 1e3:.2f} ms"
    how = (
        f"To measure the link: paceline doctor --serve {address} there, paceline doctor --to {address} here."
    )
    return Finding(f"host {text}", "ok", seen, how)
