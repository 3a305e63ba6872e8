"""Whatever becomes of the process that made a testbed, nothing of the testbed is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex

import pytest

from paceline.errors import ConfigError
from paceline.testbed import HostSpec, Spec, Testbed, network, records, why_not
from paceline.testbed.bed import take_down
from support.testbed import traces_of

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

OWNER = """
import sys, time
from paceline.testbed import HostSpec, Spec, Testbed
bed = Testbed.up(Spec({"a": HostSpec(cpu=0.5), "b": HostSpec(link_mbit=10)}, sys.argv[1]))
with bed:
    inside = bed["a"].popen(["sh", "-c", "sleep 300 & sleep 300"])
    while len(bed["a"].pids) != 3:
        time.sleep(0.01)
    print(bed._guard.pid, *bed["a"].pids, flush=True)
    time.sleep(300)
"""


class Owned:
    """A testbed that belongs to another process, with two sleepers and a shell on host `a`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, name], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        with self.process.stdout as told:
            self.guard, *self.inside = map(int, told.readline().split())

    def end(self, how: int) -> None:
        self.process.send_signal(how)
        self.process.wait(20)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"x{token_hex(3)}"
    yield name
    take_down(name)


@pytest.fixture
def owned(name: str) -> Iterator[Owned]:
    owned = Owned(name)
    yield owned
    owned.end(signal.SIGKILL)


def eventually(condition: Callable[[], bool], within_s: float = 15.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_testbed_is_gone_when_its_block_ends(name: str) -> None:
    with Testbed.up(Spec({"a": HostSpec(cpu=0.5), "b": HostSpec(link_mbit=10)}, name)) as bed:
        process = bed["a"].popen(["sleep", "300"])
        assert len(traces_of(name)) == 5  # two hosts, a switch, a control group, a record
    assert traces_of(name) == []
    assert process.returncode == -signal.SIGKILL


def test_a_testbed_is_gone_after_an_exception(name: str) -> None:
    def fail() -> None:
        with Testbed.up(Spec({"a": HostSpec(cpu=0.5)}, name)) as bed:
            bed["a"].popen(["sleep", "300"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert traces_of(name) == []


def test_no_link_ever_shows_up_in_the_machines_own_network(name: str) -> None:
    before = sorted(os.listdir("/sys/class/net"))
    with Testbed.up(Spec({"a": HostSpec(), "b": HostSpec()}, name)):
        assert sorted(os.listdir("/sys/class/net")) == before


def test_a_testbed_that_cannot_be_made_leaves_nothing_half_made(name: str) -> None:
    without_groups = ["unshare", "--mount", "sh", "-c", 'umount -l /sys/fs/cgroup && exec "$@"', "sh"]
    done = subprocess.run(
        [*without_groups, sys.executable, "-c", OWNER, name],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "host 'a' asks for cpu = 0.5, and no control group" in done.stderr
    assert traces_of(name) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_testbed_goes_with_its_owner_however_that_ends(owned: Owned, how: int) -> None:
    owned.end(how)
    assert eventually(lambda: traces_of(owned.name) == [])
    assert not any(map(alive, owned.inside))
    assert eventually(lambda: not alive(owned.guard))


def test_what_an_owner_and_its_guard_left_is_found_and_removed(owned: Owned) -> None:
    os.kill(owned.guard, signal.SIGKILL)
    owned.end(signal.SIGKILL)
    assert len(traces_of(owned.name)) == 5
    assert all(map(alive, owned.inside))
    with Testbed.up({"a": HostSpec()}) as other:  # any testbed will do
        assert traces_of(owned.name) == []
        assert traces_of(other.name)
    assert not any(map(alive, owned.inside))


def test_the_testbed_of_a_living_owner_is_not_taken_from_it(owned: Owned) -> None:
    spec = Spec({"a": HostSpec()}, owned.name)
    with pytest.raises(ConfigError, match=f"is up already, and belongs to process {owned.process.pid}"):
        Testbed.up(spec)
    with Testbed.up({"a": HostSpec()}):
        pass
    assert all(map(alive, owned.inside))
    owned.end(signal.SIGTERM)
    assert eventually(lambda: traces_of(owned.name) == [])


def test_what_a_killed_up_left_half_made_is_removed_by_the_next(name: str) -> None:
    spec = Spec({"a": HostSpec(), "b": HostSpec()}, name)
    with records.exclusively():
        records.folder_of(name).mkdir()
        network.build(Spec({"a": HostSpec()}, name))
    with Testbed.up(spec) as bed:
        assert bed["b"].run(["true"]).returncode == 0
    assert traces_of(name) == []


def test_a_later_process_with_the_same_id_is_no_owner() -> None:
    owner = records.this_process()
    assert owner.alive
    assert not records.BedOwner(owner.pid, owner.start + "0").alive


def test_taking_down_twice_is_harmless(name: str) -> None:
    bed = Testbed.up(Spec({"a": HostSpec()}, name))
    bed.down()
    bed.down()
    assert traces_of(name) == []
