"""Which workers sit on which host, and how fast hosts are joined: a description of the network, in words.

`0,1,2,3@0.1|4,5,6,7@0.1` are two hosts of four workers each, whose uplinks are ten times slower than links
within a host. From it follows how to group workers so that little crosses an uplink: *rows* are the hosts;
a *column* has one worker of each, so all columns of a host share its uplink evenly.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from paceline.errors import ConfigError

Grouping = list[tuple[int, ...]]
MOST = 8
"""Groupings within hosts for one across them, however slow the uplinks: nothing else would ever arrive."""


class HostGroup(NamedTuple):
    """Some workers that are near to each other."""

    ranks: tuple[int, ...]
    uplink: float
    """How fast it is, compared to the links within."""


def parse_hosts(text: str) -> list[HostGroup]:
    """Hosts by bars, ranks by commas, the speed of the uplink after an @; 1 without."""
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
                f"{speed}, so nothing that its workers learn ever leaves it. Give a speed > 0."
            )
    return hosts


def cycle_of(hosts: list[HostGroup]) -> list[Grouping]:
    """Within hosts as often as across them costs, then across."""
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
