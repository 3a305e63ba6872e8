"""The testbed and its hosts, as Python objects."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from paceline.errors import ConfigError, RunError, unknown
from paceline.testbed import cpu, network, processes, records
from paceline.testbed.guard import start_guard
from paceline.testbed.records import BedRecord
from paceline.testbed.spec import HostSpec, Spec, check_bed_name
from paceline.testbed.system import need_privileges


class BedHost:
    """One host of a testbed."""

    def __init__(self, name: str, record: BedRecord) -> None:
        self.name = name
        self.spec = record.spec.hosts[name]
        self.address = network.addresses(record.spec)[name]
        self._bed = record.spec.name
        self._group = record.groups.get(name, "")
        self._started: list[subprocess.Popen[Any]] = []

    @property
    def namespace(self) -> str:
        """Name of its network namespace, for `ip netns exec` and the like."""
        return network.namespace_of(self._bed, self.name)

    @property
    def pids(self) -> list[int]:
        """Processes that run on it."""
        return processes.members(self.namespace)

    @property
    def is_cut(self) -> bool:
        """Whether its link is cut."""
        return network.port_of(self.name) not in network.joined(self._bed)

    def command(self, command: Sequence[str | os.PathLike[str]]) -> list[str]:
        """The command line that runs a command on this host; its process becomes the command."""
        hosts = records.folder_of(self._bed) / "hosts"
        return processes.entering(self.namespace, self.name, hosts, self._group, list(map(str, command)))

    def popen(self, command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host; options are those of `subprocess.Popen`."""
        process = subprocess.Popen(self.command(command), **options)
        self._started = [*(old for old in self._started if old.poll() is None), process]
        return process

    def run(
        self, command: Sequence[str | os.PathLike[str]], timeout_s: float = 60.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end, with its output as text; it and its group die when late."""
        given = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        process = self.popen(command, start_new_session=True, **given | options)
        with process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException as error:
                _kill_group(process)
                if isinstance(error, subprocess.TimeoutExpired):
                    said = f"`{' '.join(map(str, command))}` on host {self.name!r}"
                    raise RunError(f"{said} did not end within {timeout_s:g} s. Raise its timeout.") from None
                raise
        return subprocess.CompletedProcess(list(map(str, command)), process.returncode, out, err)

    def cut(self) -> None:
        """Let all packets from and to this host vanish; connections see silence, not an end."""
        network.cut(self._bed, self.name)

    def heal(self) -> None:
        """Join it again; connections go on where they were."""
        network.heal(self._bed, self.name)

    def kill(self) -> list[int]:
        """Kill all processes of this host, and return their ids. The host itself stays, as if started anew.

        The kernel closes their connections, so others learn of it. Cut it first to take its power away.
        """
        there = self.pids
        for process in self._started:
            process.kill()  # one that has not entered its namespace yet would be missed below
        killed = sorted({*there, *processes.kill_members(self.namespace)})
        for process in self._started:
            process.wait()
        self._started.clear()
        return killed


class Testbed(Mapping[str, BedHost]):
    """Hosts by name. Make one with `up`, take it down with `down` or a `with` block."""

    __test__ = False  # for pytest: not a class of tests

    def __init__(self, record: BedRecord) -> None:
        self.record = record
        self.name = record.spec.name
        self._hosts = {name: BedHost(name, record) for name in record.spec.hosts}
        self._guard: subprocess.Popen[bytes] | None = None

    @classmethod
    def up(cls, spec: Spec | Mapping[str, HostSpec], *, keep: bool = False) -> Testbed:
        """Make a testbed. Hosts alone get a name that no other testbed has.

        It belongs to this process and goes with it, unless it is to be kept until somebody takes it down.
        """
        need_privileges()
        if not isinstance(spec, Spec):
            spec = Spec(dict(spec), f"t{os.getpid()}-{secrets.token_hex(3)}")
        with records.exclusively():
            _clear(spec.name)
            bed = cls(_build(spec, keep))
        if not keep:
            bed._guard = start_guard(spec.name)
        return bed

    @classmethod
    def find(cls, name: str | None = None) -> Testbed:
        """A testbed that is up; no name needed if it is the only one."""
        need_privileges()
        name = records.the_one(name)
        record = records.read(name)
        if record is None:
            raise ConfigError(
                f"testbed {name!r} was not set up completely. Remove it: paceline testbed down {name}."
            )
        return cls(record)

    def down(self) -> None:
        """Kill all processes of all hosts and remove everything. Harmless when done already."""
        for host in self._hosts.values():
            host.kill()
        take_down(self.name)
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None

    def __getitem__(self, name: str) -> BedHost:
        if name not in self._hosts:
            raise unknown("host", name, self._hosts)
        return self._hosts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Testbed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()


def take_down(name: str) -> None:
    """Remove a testbed by its name, however much of it there is."""
    check_bed_name(name)
    need_privileges()
    with records.exclusively():
        _remove(name)


def take_down_stale() -> list[str]:
    """Remove all testbeds whose owners are gone; return their names."""
    need_privileges()
    with records.exclusively():
        return _remove_stale()


def _clear(name: str) -> None:
    _remove_stale()
    record = records.read(name)
    if record is None:
        _remove(name)  # whatever else goes by its name
        return
    whose = f", and belongs to process {record.owner.pid}" if record.owner else ""
    raise ConfigError(
        f"testbed {name!r} is up already{whose}. "
        f"Take it down first (paceline testbed down {name}), or choose another name."
    )


def _build(spec: Spec, keep: bool) -> BedRecord:
    record = BedRecord(spec, None if keep else records.this_process())
    try:
        _write_hosts(spec)
        network.build(spec)
        record = BedRecord(spec, record.owner, _limits(spec))
        records.write(record)
    except BaseException:
        _remove(spec.name)
        raise
    return record


def _limits(spec: Spec) -> dict[str, str]:
    controller = cpu.find_controller()
    quotas = {host: item.cpu for host, item in spec.hosts.items() if item.cpu is not None}
    return {host: str(cpu.limit(spec.name, host, cores, controller)) for host, cores in quotas.items()}


def _write_hosts(spec: Spec) -> None:
    """Names that resolve on every host: all hosts, and localhost."""
    folder = records.folder_of(spec.name)
    folder.mkdir(exist_ok=True)
    known = [("127.0.0.1", "localhost"), *((ip, host) for host, ip in network.addresses(spec).items())]
    (folder / "hosts").write_text("".join(f"{address}\t{host}\n" for address, host in known))


def _remove(name: str) -> None:
    for namespace in network.namespaces(name):
        processes.kill_members(namespace)
    network.remove(name)
    cpu.remove_groups(name, cpu.find_controller())
    records.forget(name)


def _remove_stale() -> list[str]:
    # One without a record was being made by a process that is gone: we hold the lock it held.
    stale = [name for name in records.names() if (record := records.read(name)) is None or record.stale]
    for name in stale:
        _remove(name)
    return stale


def _kill_group(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
