"""A slow link for all processes of one host of a testbed: its loopback, throttled."""

from __future__ import annotations

from paceline.errors import RunError
from paceline.testbed import BedHost


def throttle(host: BedHost, mbit: int) -> None:
    """From here on, so many Mbit/s in all."""
    shape = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst 256k latency 2000ms"
    done = host.run(shape.split(), timeout_s=10)
    if done.returncode:
        raise RunError(f"cannot throttle a link: {done.stderr.strip()}")
