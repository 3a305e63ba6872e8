"""What there is: every testbed, its hosts and how they are."""

from __future__ import annotations

import msgspec

from paceline.testbed import records
from paceline.testbed.bed import BedHost, Testbed


class HostStatus(msgspec.Struct, frozen=True):
    """How one host is."""

    host: str
    address: str
    link_mbit: float | None
    cpu: float | None
    latency_ms: float | None
    cut: bool
    processes: list[int]
    namespace: str


class Status(msgspec.Struct, frozen=True):
    """How one testbed is."""

    testbed: str
    state: str
    """kept: until it is taken down; owned: as long as its owner lives; stale: its owner is gone;
    unfinished: being made, or what a killed `up` left."""
    owner: int | None
    hosts: list[HostStatus]


def status_of(name: str) -> Status:
    """One testbed."""
    record = records.read(name)
    if record is None:
        return Status(name, "unfinished", None, [])
    owner = record.owner
    state = "kept" if owner is None else "stale" if record.stale else "owned"
    bed = Testbed(record)
    hosts = [_host_status(host) for host in bed.values()]
    return Status(name, state, owner.pid if owner else None, hosts)


def _host_status(host: BedHost) -> HostStatus:
    spec = host.spec
    cut, pids = host.is_cut, host.pids
    return HostStatus(
        host.name, host.address, spec.link_mbit, spec.cpu, spec.latency_ms, cut, pids, host.namespace
    )
