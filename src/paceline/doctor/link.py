"""Measures the way to a serving doctor, and says what to make of it."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable

import msgspec

from paceline.decoding import decode_json
from paceline.doctor.findings import Finding
from paceline.doctor.server import LinkSide, this_side
from paceline.doctor.wire import (
    ECHO,
    LENGTH,
    MAGIC,
    MOST,
    MOST_INFO,
    REQUEST,
    SECONDS,
    connect,
    drain,
    flood,
    receive,
)
from paceline.errors import RunError, Undecodable
from paceline.fabric.wire import enter

MODEL_BYTES = 100e6
_MOST_ROUNDS = 500


class MeasuredLink(msgspec.Struct, frozen=True):
    """What was measured between two hosts."""

    to: str
    mbit_per_s_there: float
    mbit_per_s_back: float
    round_trip_ms: float
    """Median."""
    round_trip_p95_ms: float
    clock_ahead_s: float
    """By how much the clock there is ahead of ours."""
    clock_error_s: float
    """How much of that may be wrong: half of the quickest round trip."""
    here: LinkSide
    there: LinkSide


def measure(address: str, secret: bytes, seconds: float = 1.0) -> MeasuredLink:
    """Measure latency, clock, and speed in each direction, about so many seconds each."""
    with connect(address) as connection:
        try:
            enter(connection, secret, MAGIC)
            there = _info(connection)
            trips = _round_trips(connection, seconds)
            ahead, error = _clock(connection)
            speeds = [_speed(connection, move, seconds) for move in (_push, _pull)]
            connection.sendall(REQUEST.pack(b"DONE", 0))
        except (OSError, Undecodable) as failure:
            raise RunError(f"measuring with {address} broke off: {failure}. Try again.") from None
    p95 = sorted(trips)[int(len(trips) * 0.95)]
    return MeasuredLink(
        to=address,
        mbit_per_s_there=speeds[0],
        mbit_per_s_back=speeds[1],
        round_trip_ms=statistics.median(trips) * 1e3,
        round_trip_p95_ms=p95 * 1e3,
        clock_ahead_s=ahead,
        clock_error_s=error,
        here=this_side(),
        there=there,
    )


def _info(connection: socket.socket) -> LinkSide:
    connection.sendall(REQUEST.pack(b"INFO", 0))
    (size,) = LENGTH.unpack(receive(connection, LENGTH.size))
    if size > MOST_INFO:
        raise ConnectionError(f"it describes itself in {size} bytes, more than {MOST_INFO}")
    return decode_json(receive(connection, size), kind=LinkSide)


def _round_trips(connection: socket.socket, seconds: float) -> list[float]:
    trips: list[float] = []
    end = time.perf_counter() + seconds
    while len(trips) < 5 or (time.perf_counter() < end and len(trips) < _MOST_ROUNDS):
        start = time.perf_counter()
        connection.sendall(REQUEST.pack(b"ECHO", ECHO) + bytes(ECHO))
        receive(connection, ECHO)
        trips.append(time.perf_counter() - start)
    return trips


def _clock(connection: socket.socket) -> tuple[float, float]:
    """The quickest of some readings is the least wrong: theirs fell somewhere within the round trip."""
    best, ahead = float("inf"), 0.0
    for _ in range(20):
        asked, start = time.time(), time.perf_counter()
        connection.sendall(REQUEST.pack(b"TIME", 0))
        (theirs,) = SECONDS.unpack(receive(connection, SECONDS.size))
        trip = time.perf_counter() - start
        if trip < best:
            best, ahead = trip, theirs - (asked + trip / 2)
    return ahead, best / 2


def _speed(connection: socket.socket, move: Callable[[socket.socket, int], None], seconds: float) -> float:
    """Twice as much again and again, until it takes long enough to be a measure; Mbit/s."""
    size = 1 << 17
    while True:
        start = time.perf_counter()
        move(connection, size)
        took = time.perf_counter() - start
        if took >= seconds / 2 or size >= MOST:
            return size * 8 / took / 1e6
        size *= 2


def _push(connection: socket.socket, size: int) -> None:
    connection.sendall(REQUEST.pack(b"SINK", size))
    flood(connection, size)
    receive(connection, 1)


def _pull(connection: socket.socket, size: int) -> None:
    connection.sendall(REQUEST.pack(b"SEND", size))
    drain(connection, size)


def judge(link: MeasuredLink) -> list[Finding]:
    """What it means for a run across these two hosts."""
    return [_judge_speed(link), _judge_round_trip(link), _judge_clock(link), *_judge_versions(link)]


def _judge_speed(link: MeasuredLink) -> Finding:
    there, back = link.mbit_per_s_there, link.mbit_per_s_back
    slow = min(there, back)
    seen = f"{there:,.0f} Mbit/s there, {back:,.0f} Mbit/s back"
    meaning = f"100 MB of gradients take {MODEL_BYTES * 8 / 1e6 / slow:.2g} s."
    if slow < 900:
        cure = "Exchange less: --compress, or local_sgd, diloco or selsync."
        return Finding("speed", "problem" if slow < 10 else "warning", seen, f"{meaning} {cure}")
    if max(there, back) > 3 * slow:
        return Finding(
            "speed", "warning", seen, f"{meaning} One direction is slow: look at its cable and port."
        )
    return Finding("speed", "ok", seen, meaning)


def _judge_round_trip(link: MeasuredLink) -> Finding:
    median = link.round_trip_ms
    seen = f"{median:.2f} ms, 95 % within {link.round_trip_p95_ms:.2f} ms"
    if median > 5:
        cure = "Lockstep pays it every iteration: allow staleness (ssp, dssp), or average rarely (local_sgd)."
        return Finding("round trip", "problem" if median > 500 else "warning", seen, cure)
    if link.round_trip_p95_ms > max(10 * median, 5):
        return Finding("round trip", "warning", seen, "Now and then it is much slower: is the link shared?")
    return Finding("round trip", "ok", seen)


def _judge_clock(link: MeasuredLink) -> Finding:
    off, error = abs(link.clock_ahead_s), link.clock_error_s
    side = "ahead" if link.clock_ahead_s > 0 else "behind"
    seen = f"there {off * 1e3:.2f} ms {side}, known to {error * 1e3:.2f} ms"
    if off - error > 0.1:
        cure = "Times of the two hosts cannot be compared, and TLS may refuse. Run chrony on both."
        return Finding("clocks", "problem" if off - error > 60 else "warning", seen, cure)
    return Finding("clocks", "ok", seen)


def _judge_versions(link: MeasuredLink) -> list[Finding]:
    findings = []
    for name in ("paceline", "torch", "python"):
        here, there = getattr(link.here, name), getattr(link.there, name)
        alike = _series(here) == _series(there)
        seen = str(here) if here == there else f"{here} here, {there} on {link.there.host}"
        cure = "" if alike else "Install the same on all hosts."
        findings.append(Finding(f"{name} on both", "ok" if alike else "problem", seen, cure))
    return findings


def _series(version: str | None) -> list[str]:
    """Major and minor: patches get along."""
    return (version or "none").split(".")[:2]
