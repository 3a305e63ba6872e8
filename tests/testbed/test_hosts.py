"""Hosts of a testbed are hosts: addresses, names, speeds, cuts, deaths."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from paceline.errors import ConfigError, RunError
from paceline.testbed import BedHost, HostSpec, Testbed
from support.testbed import Testbeds, python

pytestmark = pytest.mark.timeout(90)

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
peer, _ = server.accept()
while data := peer.recv(1 << 20):
    peer.sendall(data)
"""
SINK = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
for _ in range(int(sys.argv[2])):
    peer, _ = server.accept()
    while peer.recv(1 << 20):
        pass
    peer.sendall(b"!")
"""
SOURCE = """
import socket, sys, time
size = int(sys.argv[2])
with socket.create_connection((sys.argv[1], 7000), timeout=30) as peer:
    start = time.monotonic()
    peer.sendall(bytes(size))
    peer.shutdown(socket.SHUT_WR)
    assert peer.recv(1) == b"!"
    print(size / (time.monotonic() - start))
"""
TALK = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=60) as peer:
    for line in sys.stdin:
        peer.sendall(line.encode())
        print(peer.recv(100).decode(), end="", flush=True)
"""
SPIN = """
import time
start, used = time.monotonic(), time.process_time()
while time.monotonic() - start < 1.0:
    pass
print((time.process_time() - used) / (time.monotonic() - start))
"""
BOUNDED = "import sys, socket; socket.create_connection((sys.argv[1], 7000), timeout=0.5)"


def started(host: BedHost, code: str, *args: object) -> subprocess.Popen[str]:
    """Start a server, and wait until it says that it is ready."""
    server = host.popen(
        [sys.executable, "-c", code, host.address, *map(str, args)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return server


def conversation(host: BedHost, other: BedHost) -> subprocess.Popen[str]:
    return host.popen(
        [sys.executable, "-c", TALK, other.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def say(talk: subprocess.Popen[str], text: str) -> None:
    assert talk.stdin is not None
    talk.stdin.write(f"{text}\n")


def heard(talk: subprocess.Popen[str]) -> str:
    assert talk.stdout is not None
    return talk.stdout.readline().strip()


def test_hosts_reach_one_another_by_address_and_by_name(testbeds: Testbeds) -> None:
    bed = testbeds("a", "b")
    assert bed["a"].address != bed["b"].address
    for target in (bed["a"].address, "a"):
        with started(bed["a"], ECHO) as server:
            assert python(bed["b"], BOUNDED, target) == ""
            server.wait(10)


def test_a_host_knows_its_own_name_and_its_own_loopback(testbeds: Testbeds) -> None:
    bed = testbeds("a", "b")
    who = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
    assert python(bed["b"], who) == f"b {bed['b'].address}"
    alone = "from socket import *; s = create_server(('127.0.0.1', 7)); create_connection(s.getsockname())"
    python(bed["a"], alone)


def test_testbeds_with_the_same_addresses_do_not_meet(testbeds: Testbeds) -> None:
    one, two = testbeds("a", "b"), testbeds("a", "b")
    assert one["a"].address == two["a"].address
    with started(one["a"], ECHO) as server:
        assert two["b"].run([sys.executable, "-c", BOUNDED, one["a"].address]).returncode != 0
        python(one["b"], BOUNDED, one["a"].address)
        server.wait(10)


@pytest.mark.parametrize("limited", ["sender", "receiver"])
def test_a_link_is_as_fast_as_it_was_told_in_either_direction(testbeds: Testbeds, limited: str) -> None:
    bed = testbeds({"fast": HostSpec(link_mbit=200), "slow": HostSpec(link_mbit=50), "free": HostSpec()})
    rates = {}
    for name in ("fast", "slow"):
        host, other = (bed[name], bed["free"]) if limited == "receiver" else (bed["free"], bed[name])
        with started(host, SINK, 1) as server:
            rates[name] = float(python(other, SOURCE, host.address, 5_000_000))
            server.wait(10)
    assert rates["slow"] * 8 < 50e6 * 1.1, rates
    assert 1.5 * rates["slow"] < rates["fast"] < 200e6 / 8 * 1.3, rates  # or as a busy machine is


def test_a_cut_is_silence_and_the_same_connection_goes_on_after_it(testbeds: Testbeds) -> None:
    bed = testbeds("a", "b")
    with started(bed["a"], ECHO), conversation(bed["b"], bed["a"]) as talk:
        say(talk, "one")
        assert heard(talk) == "one"
        bed["b"].cut()
        assert bed["b"].is_cut
        assert not bed["a"].is_cut
        say(talk, "two")
        time.sleep(1)
        assert bed["a"].run([sys.executable, "-c", BOUNDED, bed["b"].address]).returncode != 0
        assert talk.poll() is None
        bed["b"].heal()
        assert not bed["b"].is_cut
        assert heard(talk) == "two"
        assert talk.stdin is not None
        talk.stdin.close()
        assert talk.wait(10) == 0


def test_a_killed_host_loses_all_its_processes_and_no_other_host_does(testbeds: Testbeds) -> None:
    bed = testbeds("a", "b")
    family = "import os, time; os.fork(); print(flush=True); os.getpid() % 2 and os.setsid(); time.sleep(60)"
    with (
        bed["a"].popen([sys.executable, "-c", family], stdout=subprocess.PIPE) as mine,
        bed["b"].popen(["sleep", "60"]) as other,
    ):
        assert mine.stdout is not None
        assert [mine.stdout.readline() for _ in range(2)] == [b"\n", b"\n"]
        _wait_for(lambda: bed["b"].pids)
        there = bed["a"].pids
        assert len(there) == 2
        assert bed["a"].kill() == sorted(there)
        assert bed["a"].pids == []
        assert mine.poll() == -9
        assert other.poll() is None
        assert bed["a"].run(["true"]).returncode == 0
        bed["b"].kill()


def test_a_process_of_a_host_is_the_command_itself(testbeds: Testbeds) -> None:
    host = testbeds("a")["a"]
    with host.popen(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE
    ) as process:
        assert int(process.communicate(timeout=10)[0]) == process.pid
    process = host.popen(["sleep", "60"])
    _wait_for(lambda: host.pids == [process.pid])
    process.terminate()
    assert process.wait(10) == -15


@pytest.mark.parametrize("cores", [0.1, 0.25])
def test_a_host_gets_no_more_of_the_cpu_than_its_share(testbeds: Testbeds, cores: float) -> None:
    bed = testbeds("a", cpu=cores)
    assert float(python(bed["a"], SPIN)) < 1.4 * cores


def test_a_command_that_is_late_is_ended_with_all_that_it_started(testbeds: Testbeds) -> None:
    host = testbeds("a")["a"]
    with pytest.raises(RunError, match=r"did not end within 0.5 s"):
        host.run(["sh", "-c", "sleep 60 & sleep 60"], timeout_s=0.5)
    _wait_for(lambda: not host.pids)


def test_latency_is_given_or_refused_in_one_sentence(testbeds: Testbeds) -> None:
    if not _kernel_can_delay():
        with pytest.raises(ConfigError, match=r"it has no netem .* Leave latency_ms out"):
            testbeds("a", "b", latency_ms=50)
        return
    bed = testbeds("a", "b", latency_ms=50)
    with started(bed["a"], ECHO):
        clock = (
            f"import time; t = time.monotonic(); {BOUNDED.replace('0.5', '5')}; print(time.monotonic() - t)"
        )
        assert float(python(bed["b"], clock, bed["a"].address)) > 0.1


def _kernel_can_delay() -> bool:
    probe = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(probe, capture_output=True, timeout=10, check=False).returncode == 0


def test_an_unknown_host_is_named_with_those_there_are(testbeds: Testbeds) -> None:
    bed: Testbed = testbeds("alpha", "beta")
    with pytest.raises(ConfigError, match=r"unknown host 'alfa'\. Did you mean 'alpha'"):
        bed["alfa"]


def _wait_for(condition: object, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)
