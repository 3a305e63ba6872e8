"""A text description of the network: which workers are on which host, and how fast the hosts' uplinks are.

`0,1,2,3@0.1|4,5,6,7@0.1` are two hosts of four workers each, whose uplinks are ten times slower than links
within a host. DS-Sync uses it to group workers so that little crosses an uplink: *rows* are the hosts;
a *column* has one worker of each, so all columns of a host share its uplink evenly.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from paceline.errors import ConfigError

Grouping = list[tuple[int, ...]]
MOST = 8
"""Most groupings within hosts per grouping across them, however slow the uplinks are. Without a limit nothing
would arrive."""


class HostGroup(NamedTuple):
    """The workers of one host."""

    ranks: tuple[int, ...]
    uplink: float
    """Speed of the host's uplink relative to the links within it."""


def parse_hosts(text: str) -> list[HostGroup]:
    """Parse hosts separated by bars, ranks by commas, and the uplink's speed after an @ (default 1)."""
    hosts = []
    for item in (part.strip() for part in text.split("|") if part.strip()):
        ranks, _, speed = item.partition("@")
        try:
            hosts.append(HostGroup(tuple(sorted(map(int, ranks.split(",")))), float(speed or 1)))
        except ValueError:
            raise ConfigError(
                f"hosts are written as 0,1@0.1|2,3@0.1 (ranks, then the speed of the host's uplink compared "
                f"to links within it), got {item!r}."
            ) from None
        if not hosts[-1].uplink > 0:
            raise ConfigError(
                f"the pattern never mixes all workers: the uplink of the host with ranks {ranks} has speed "
                f"{speed}, so updates of its workers never leave it. Give a speed > 0."
            )
    return hosts


def cycle_of(hosts: list[HostGroup]) -> list[Grouping]:
    """One cycle: several groupings within hosts, as many as one across them costs, then one across."""
    rows = [host.ranks for host in hosts]
    if len(hosts) < 2:
        return [rows]
    deepest = max(map(len, rows))
    columns = [tuple(sorted(row[place] for row in rows if place < len(row))) for place in range(deepest)]
    if deepest == 1:
        return [columns]
    return [rows] * _times_within(hosts) + [columns]


def _times_within(hosts: list[HostGroup]) -> int:
    """How often a step within hosts fits into the time of one across.

    An averaging among n sends 2 (n-1)/n of a model per worker; across, all of a host's workers do so through
    its uplink, and the slowest host counts.
    """
    within = max(2 * (len(host.ranks) - 1) / len(host.ranks) for host in hosts)
    across = max(2 * (len(hosts) - 1) / len(hosts) * len(host.ranks) / host.uplink for host in hosts)
    return max(1, min(MOST, ceil(across / within)))
