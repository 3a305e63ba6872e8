"""Two doctors measure the way between them, and let nobody else take part."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.doctor.link import MeasuredLink, judge, measure
from paceline.doctor.server import LinkServer, LinkSide
from paceline.doctor.wire import MAGIC, connect
from paceline.errors import ConfigError
from paceline.fabric.wire import enter
from paceline.testbed import HostSpec, Testbed
from support.command import COMMAND, run_command
from support.testbed import Testbeds

pytestmark = pytest.mark.timeout(90)

SECRET = b"a secret of the two doctors"
GREETING = len(MAGIC) + 32
EARLY = """
import time
real = time.time
time.time = lambda: real() + 5
from paceline.cli.main import main
main()
"""


@contextmanager
def serving() -> Iterator[str]:
    """A serving doctor on loopback, and its address."""
    server = LinkServer("127.0.0.1:0", SECRET)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.stop()
        thread.join(10)


def healthy(address: str) -> bool:
    """Whether a doctor with the secret is still served."""
    return measure(address, SECRET, seconds=0.05).mbit_per_s_there > 0


def test_speed_round_trip_and_clock_are_measured_over_loopback() -> None:
    with serving() as address:
        link = measure(address, SECRET, seconds=0.1)
    assert min(link.mbit_per_s_there, link.mbit_per_s_back) > 0
    assert 0 < link.round_trip_ms <= link.round_trip_p95_ms
    assert abs(link.clock_ahead_s) < 0.1  # it is the same clock
    assert link.here == link.there


def test_a_wrong_secret_is_refused_and_harms_nobody() -> None:
    with serving() as address:
        with pytest.raises(ConfigError, match="the secret is wrong"):
            measure(address, b"another secret altogether", seconds=0.05)
        assert healthy(address)


@contextmanager
def answering(first: bytes, second: bytes) -> Iterator[str]:
    """Something else that listens: says two things to one peer."""

    def answer() -> None:
        peer, _ = server.accept()
        with peer, suppress(OSError):
            peer.sendall(first)
            peer.recv(64)
            peer.sendall(second)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    with (
        answering(MAGIC + bytes(32), bytes([7]) * 32) as address,
        pytest.raises(ConfigError, match="does not know our secret"),
    ):
        measure(address, SECRET)


def test_what_is_no_doctor_is_told_apart() -> None:
    with (
        answering(b"HTTP/1.1 400\r\n" * 8, b"") as address,
        pytest.raises(ConfigError, match="is not this version of Paceline"),
    ):
        measure(address, SECRET)


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), struct.pack(">4sQ", b"SEND", 1 << 30) * 8],
    ids=["nothing", "http", "zeros", "requests"],
)
def test_a_stranger_gets_the_greeting_and_nothing_else(sent: bytes) -> None:
    with serving() as address, connect(address) as stranger:
        with suppress(OSError):  # it may be refused before it has sent all
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
        got = b""
        while part := _receive(stranger):
            got += part
        assert len(got) <= GREETING + 32  # and a refusal
        assert healthy(address)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1000)
    except ConnectionResetError:
        return b""


def test_strangers_who_drip_bytes_neither_stay_nor_keep_others_waiting() -> None:
    with serving() as address:
        strangers = [connect(address) for _ in range(4)]
        assert healthy(address)
        start = time.monotonic()
        for stranger in strangers:
            with stranger:
                stranger.settimeout(20)
                _drip(stranger)
        assert time.monotonic() - start < 20
        assert healthy(address)


def _drip(stranger: socket.socket) -> None:
    """One byte at a time, until the server has had enough."""
    try:
        stranger.recv(GREETING)
        for _ in range(63):
            stranger.sendall(b"x")
            time.sleep(0.25)
        pytest.fail("a byte now and then kept the connection open")
    except OSError:
        pass


@pytest.mark.parametrize("request_", [(b"SEND", 1 << 60), (b"SINK", (1 << 64) - 1), (b"EVIL", 0)])
def test_a_size_beyond_all_bounds_ends_the_conversation(request_: tuple[bytes, int]) -> None:
    with serving() as address:
        with connect(address) as peer:
            enter(peer, SECRET, MAGIC)
            peer.sendall(struct.pack(">4sQ", *request_))
            assert _receive(peer) == b""
        assert healthy(address)


def test_nobody_there_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    done = run_command("doctor", "--to", "127.0.0.1:1", "--secret-file", "secret", cwd=tmp_path, timeout_s=30)
    assert done.returncode == 1
    assert "no doctor answers at 127.0.0.1:1: Connection refused. Start one there" in done.stderr


def side(**changed: Any) -> LinkSide:
    return msgspec.structs.replace(LinkSide("a", 2, "3.11.7", "0.1.0", "2.6.0"), **changed)


def link(**changed: Any) -> MeasuredLink:
    good = MeasuredLink("b", 9e3, 9e3, 0.1, 0.2, 0.0, 1e-4, side(), side(host="b"))
    return msgspec.structs.replace(good, **changed)


@pytest.mark.parametrize(
    ("changed", "check", "state", "advice"),
    [
        ({}, "speed", "ok", "100 MB of gradients take 0.089 s."),
        ({"mbit_per_s_back": 100}, "speed", "warning", "take 8 s. Exchange less"),
        ({"mbit_per_s_there": 5}, "speed", "problem", "Exchange less"),
        ({"mbit_per_s_there": 1e3}, "speed", "warning", "One direction is slow"),
        ({"round_trip_ms": 30.0}, "round trip", "warning", "allow staleness"),
        ({"round_trip_p95_ms": 30.0}, "round trip", "warning", "is the link shared"),
        ({"clock_ahead_s": -0.2}, "clocks", "warning", "Run chrony"),
        ({"clock_ahead_s": 0.2, "clock_error_s": 0.15}, "clocks", "ok", ""),
        ({"there": side(torch="2.7.0")}, "torch on both", "problem", "the same on all hosts"),
        ({"there": side(torch="2.6.1")}, "torch on both", "ok", ""),
        ({"there": side(paceline=None)}, "paceline on both", "problem", "the same on all hosts"),
    ],
)
def test_what_was_measured_is_judged_with_a_remedy(
    changed: dict[str, Any], check: str, state: str, advice: str
) -> None:
    found = {finding.check: finding for finding in judge(link(**changed))}
    assert found[check].state == state
    assert advice in found[check].advice
    assert [name for name, finding in found.items() if finding.state != "ok" and name != check] == []


def served(bed: Testbed, name: str, folder: Path, *start: str) -> subprocess.Popen[str]:
    """A doctor that serves on a host, once it is ready."""
    command = [*(start or (str(COMMAND),)), "doctor", "--serve", bed[name].address, "--secret-file", "secret"]
    server: subprocess.Popen[str] = bed[name].popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    assert "serving at" in server.stderr.readline()
    return server


def asked(bed: Testbed, name: str, other: str, folder: Path) -> tuple[int, Any]:
    flags = ["--secret-file", "secret", "--seconds", "0.5", "--json"]
    done = bed[name].run([COMMAND, "doctor", "--to", other, *flags], cwd=folder, timeout_s=60)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_between_hosts_a_slower_link_is_measured_slower(testbeds: Testbeds, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    bed = testbeds({"a": HostSpec(), "fast": HostSpec(link_mbit=80), "slow": HostSpec(link_mbit=8)})
    with served(bed, "a", tmp_path) as server:
        code, fast = asked(bed, "fast", "a", tmp_path)
        assert code == 0
        code, slow = asked(bed, "slow", "a", tmp_path)
        assert (code, slow["state"]) == (1, "problem")
        server.terminate()
        assert server.wait(20) == 0
    for way in ("mbit_per_s_there", "mbit_per_s_back"):
        assert 4 < fast["link"][way] / slow["link"][way] < 20
        assert slow["link"][way] < 8 * 1.1
    assert (slow["link"]["here"]["host"], slow["link"]["there"]["host"]) == ("slow", "a")


def test_a_clock_that_is_ahead_is_found_out(testbeds: Testbeds, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    bed = testbeds("a", "b")
    with served(bed, "a", tmp_path, sys.executable, "-c", EARLY) as server:
        _, answer = asked(bed, "b", bed["a"].address, tmp_path)
        server.kill()
    assert abs(answer["link"]["clock_ahead_s"] - 5) < answer["link"]["clock_error_s"] + 0.1
    clocks = next(item for item in answer["findings"] if item["check"] == "clocks")
    assert clocks["state"] == "warning"


def test_a_host_behind_a_cut_gives_no_answer(testbeds: Testbeds, tmp_path: Path) -> None:
    bed = testbeds("a", "b")
    bed["b"].cut()
    done = bed["a"].run([COMMAND, "doctor", "--host", "b", "--json"], cwd=tmp_path)
    assert done.returncode == 1
    finding = json.loads(done.stdout)["findings"][-1]
    assert (finding["check"], finding["state"]) == ("host b", "problem")
