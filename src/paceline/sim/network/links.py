"""Links as a cluster file has them: a worker's own way to the store, or those of hosts and racks."""

from __future__ import annotations

from math import inf
from typing import Literal

import msgspec

from paceline.sim.compute import require

Fabric = Literal["star", "ring"]
"""How vectors of peers travel between hosts: through the first one, or around (gloo, DDP)."""


class Link(msgspec.Struct, frozen=True):
    """A worker's way to the store; both directions alike."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float | None = None
    """None: without limit."""

    def __post_init__(self) -> None:
        check_link(self.latency_s, self.bandwidth_bytes_per_s)

    def seconds(self, size_bytes: int) -> float:
        """How long a message of that size is under way."""
        rate = self.bandwidth_bytes_per_s
        return self.latency_s + (0.0 if rate is None else size_bytes / rate)


class Host(msgspec.Struct, frozen=True):
    """A machine. Each direction of its link has the whole bandwidth, shared by all that crosses it."""

    workers: int = 1
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float | None = None
    """None: without limit."""
    rack: str = ""
    """Hosts of one rack reach each other without its uplink."""

    def __post_init__(self) -> None:
        require(self.workers >= 1, "a host has workers >= 1", self.workers, "Leave an empty host out.")
        check_link(self.latency_s, self.bandwidth_bytes_per_s)


def check_link(late: float, rate: float | None) -> None:
    """Refuse what no link can be."""
    require(0 <= late < inf, "link latency_s must be >= 0", late, "0.0001 is a usual local network.")
    remedy = "1.25e9 is 10 Gbit/s; leave it out when bytes cost nothing."
    require(rate is None or 0 < rate < inf, "link bandwidth_bytes_per_s must be > 0", rate, remedy)


def check_hosts(
    workers: int, hosts: tuple[Host, ...], racks: dict[str, Link], own_links: bool, fabric: Fabric
) -> None:
    """Whether hosts and racks make one network for so many workers."""
    total = sum(host.workers for host in hosts)
    remedy = "Leave workers out: it is the sum of the hosts'."
    ok = not hosts or total == workers
    require(ok, f"the hosts have {total} workers, and workers differs", workers, remedy)
    remedy = "With [[host]], write bandwidth and latency there."
    require(
        not (hosts and own_links),
        "links of workers do not work together with hosts, which have their own links: hosts",
        len(hosts),
        remedy,
    )
    ok = bool(hosts) or fabric == "star"
    require(ok, "a fabric is for hosts", fabric, "Add [[host]], or leave fabric out.")
    unknown = sorted({host.rack for host in hosts if host.rack} - racks.keys())
    require(not unknown, "hosts stand in racks without an uplink", unknown, "Add [racks.NAME].")
    strange = sorted(racks.keys() - {host.rack for host in hosts})
    require(not strange, "racks without a host", strange, 'Write rack = "NAME" in a [[host]].')
