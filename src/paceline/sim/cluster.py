"""What the simulator knows of a cluster: how fast its workers compute, and how bytes reach the store.

A cluster is written as a TOML file or made from flags. A worker's iteration takes

    pull + compute x slow factor x drift (longer in a slow phase) + push, then its turn at the store

and the store serves one push at a time. Ranks count through the groups in the order they are
written; without groups all workers are alike but for `slow`, `links` and their random streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite
from pathlib import Path
from typing import Any

import msgspec

from paceline.decoding import decode_json
from paceline.errors import ConfigError
from paceline.sim.compute import ComputeTime, Fixed, Lognormal, Recorded, require, with_batches_alike
from paceline.sim.network.links import Fabric, Host, Link, check_hosts
from paceline.trace import read_trace
from paceline.trace.events import Decided, ModelReady, RunStarted

MOST_WORKERS = 10_000_000
"""This many fit into memory."""


class Transient(msgspec.Struct, frozen=True):
    """Slow phases that come and go: a neighbour's job, a full page cache, a hot processor."""

    factor: float
    """A slow phase makes computing this many times slower."""
    mean_length_s: float
    mean_gap_s: float

    def __post_init__(self) -> None:
        remedy = "2 makes a slow phase half as fast."
        require(1 <= self.factor < inf, "transient factor must be >= 1", self.factor, remedy)
        for name in ("mean_length_s", "mean_gap_s"):
            value = getattr(self, name)
            require(0 < value < inf, f"transient {name} must be > 0", value, "Give a mean time in seconds.")


class Stall(msgspec.Struct, frozen=True):
    """One rank at a time stalls: all but the first take turns."""

    every_s: float
    """Time from the start of one stall to the next, and until the first one."""
    length_s: float

    def __post_init__(self) -> None:
        ok = 0 < self.length_s <= self.every_s < inf
        given = {"every_s": self.every_s, "length_s": self.length_s}
        require(ok, "a stall needs 0 < length_s <= every_s", given, "every_s = 8, length_s = 2, say.")

    def of(self, rank: int, workers: int, number: int) -> tuple[float, float]:
        """Start and end of a rank's stall with this number."""
        begins = self.every_s * (number * (workers - 1) + rank)
        return begins, begins + self.length_s

    def who(self, t: float, workers: int) -> int | None:
        """The rank that is stalled at a given time."""
        number, since = divmod(t, self.every_s)
        if workers < 2 or number < 1 or since >= self.length_s:
            return None
        return 1 + (int(number) - 1) % (workers - 1)


class Drift(msgspec.Struct, frozen=True):
    """A trend: computing becomes slower, or faster, little by little, and stays so.

    The pace goes in a straight line; an iteration has that of the moment it begins.
    """

    factor: float
    """In the end computing is this many times slower; below 1 it is faster."""
    over_s: float
    """How long it takes until then, from the start of the run."""

    def __post_init__(self) -> None:
        remedy = "2 ends half as fast, 0.5 twice as fast."
        require(0 < self.factor < inf, "drift factor must be > 0", self.factor, remedy)
        remedy = "Give the seconds from the start to the end of the trend."
        require(0 < self.over_s < inf, "drift over_s must be > 0", self.over_s, remedy)

    def at(self, now: float) -> float:
        """How many times slower computing is by then."""
        return 1.0 + (self.factor - 1.0) * min(1.0, now / self.over_s)


class Membership(msgspec.Struct, frozen=True):
    """A worker is lost, or comes (back), at a time: spot machines do both."""

    at_s: float
    kill: int | None = None
    join: int | None = None

    def __post_init__(self) -> None:
        require(0 <= self.at_s < inf, "event at_s must be >= 0", self.at_s, "Give seconds from the start.")
        given = {"kill": self.kill, "join": self.join}
        ok = (self.kill is None) != (self.join is None)
        require(ok, "an event needs either kill or join", given, "Write two events for two ranks.")

    @property
    def rank(self) -> int:
        """Whom it happens to."""
        rank = self.join if self.kill is None else self.kill
        assert rank is not None
        return rank


class Group(msgspec.Struct, frozen=True):
    """Workers that are alike; what is left out is as in the cluster."""

    count: int
    compute: ComputeTime | None = None
    slow: float = 1.0
    transient: Transient | None = None
    link: Link | None = None
    drift: Drift | None = None

    def __post_init__(self) -> None:
        require(self.count >= 1, "group count must be >= 1", self.count, "Remove an empty group.")
        _check_slow("a group", self.slow)


class Profile(msgspec.Struct, frozen=True):
    """What one rank is like, all told."""

    compute: ComputeTime
    slow: float
    transient: Transient | None
    link: Link
    drift: Drift | None = None


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A whole cluster; `profiles` says what each rank is like."""

    workers: int
    compute: ComputeTime = Fixed(0.1)
    batch: int = 1
    """Samples behind one push."""
    model_bytes: int | None = None
    """Size of the weights, and of a gradient. None: unknown, and bytes are not counted."""
    apply_s: float = 0.0
    """How long the store is busy with one push; it serves one at a time."""
    link: Link = Link()
    links: dict[int, Link] = {}
    """Links of single ranks."""
    host: tuple[Host, ...] = ()
    """Machines, whose workers share their links, in the order of ranks. The first has the store, or the place
    where peers meet."""
    racks: dict[str, Link] = {}
    """Uplinks of racks, each way."""
    fabric: Fabric = "star"
    """How peers' vectors travel between hosts."""
    store_hosts: int = 1
    """So many of the first hosts hold an equal portion of the store each, as with `train --store-hosts`."""
    slow: dict[int, float] = {}
    """Ranks that always compute this many times slower."""
    transient: Transient | None = None
    drift: Drift | None = None
    stall: Stall | None = None
    group: tuple[Group, ...] = ()
    event: tuple[Membership, ...] = ()

    def __post_init__(self) -> None:
        require(self.workers >= 1, "a cluster needs workers >= 1", self.workers, "Use --workers 4, say.")
        few = self.workers <= MOST_WORKERS
        require(few, f"a cluster has at most {MOST_WORKERS} workers", self.workers, "Use fewer.")
        require(self.batch >= 1, "batch must be >= 1", self.batch, "It is the samples behind one push.")
        ok = isfinite(self.apply_s) and self.apply_s >= 0
        require(ok, "apply_s must be >= 0", self.apply_s, "It is the store's seconds per push.")
        remedy = "Leave it out when it is unknown."
        size = self.model_bytes
        require(size is None or size > 0, "model_bytes must be > 0", size, remedy)
        self._check_groups()
        self._check_ranks()
        self._check_links()
        check_hosts(self.workers, self.host, self.racks, bool(self._worker_links), self.fabric)
        most = max(1, len(self.host))
        remedy = f"Use 1 to {most}: there are {len(self.host)} [[host]] tables."
        ok = 1 <= self.store_hosts <= most
        require(ok, "the store lies on store_hosts of the hosts", self.store_hosts, remedy)
        _check_membership(self.event)

    @classmethod
    def from_flags(
        cls,
        *,
        workers: int,
        compute_s: float = 0.1,
        jitter: float = 0.0,
        slow: Mapping[int, float] | None = None,
        latency_s: float = 0.0,
        bandwidth_bytes_per_s: float | None = None,
        apply_s: float = 0.0,
        model_bytes: int | None = None,
        batch: int = 1,
    ) -> Cluster:
        """A cluster of like workers, some of them slower: what fits on a command line."""
        return cls(
            workers=workers,
            compute=Lognormal(compute_s, jitter) if jitter else Fixed(compute_s),
            slow=dict(slow or {}),
            link=Link(latency_s, bandwidth_bytes_per_s),
            apply_s=apply_s,
            model_bytes=model_bytes,
            batch=batch,
        )

    @classmethod
    def from_run(cls, run: Path) -> Cluster:
        """The cluster a run was made on, as far as its trace tells: compute times, size, batch."""
        events = with_batches_alike(read_trace(run))
        workers = [event.workers for event in events if isinstance(event, RunStarted)]
        require(bool(workers), "a run to take a cluster from needs a trace", str(run), "Record a run first.")
        sizes = [event.gradient_bytes for event in events if isinstance(event, ModelReady)]
        batches = [e.samples for e in events if isinstance(e, Decided) and e.pushed is not None]
        return cls(
            workers=workers[0],
            compute=Recorded.from_events(str(run), events),
            model_bytes=sizes[0] if sizes and sizes[0] else None,
            batch=max(batches, default=1) or 1,
        )

    def with_workers(self, workers: int) -> Cluster:
        """The same kind of cluster, larger or smaller; groups keep their shares."""
        if workers == self.workers:
            return self
        require(
            not self.host, "hosts name their workers, other numbers", workers, "Change [[host]] in the file."
        )
        counts = _apportion(workers, [group.count for group in self.group])
        groups = [msgspec.structs.replace(g, count=n) for g, n in zip(self.group, counts, strict=True) if n]
        return msgspec.structs.replace(self, workers=workers, group=tuple(groups))

    def with_slow(self, slow: Mapping[int, float]) -> Cluster:
        """The same cluster with more ranks made slower, as `--slow 3:2.5` asks."""
        return msgspec.structs.replace(self, slow={**self.slow, **slow})

    def profiles(self) -> list[Profile]:
        """What each rank is like, in rank order."""
        groups = (group for group in self.group or (Group(self.workers),) for _ in range(group.count))
        return [self._profile(rank, group) for rank, group in enumerate(groups)]

    def absent_at_start(self) -> set[int]:
        """Ranks whose first event is that they join."""
        first: dict[int, Membership] = {}
        for event in sorted(self.event, key=lambda event: event.at_s):
            first.setdefault(event.rank, event)
        return {rank for rank, event in first.items() if event.join is not None}

    def describe(self) -> dict[str, Any]:
        """The cluster as plain data, for a trace; recorded times stay in the run they come from."""
        plain: dict[str, Any] = decode_json(msgspec.json.encode(self))
        for part in (plain, *plain["group"]):
            if part["compute"] is not None:
                part["compute"].pop("times_s", None)
        return plain

    def _profile(self, rank: int, group: Group) -> Profile:
        return Profile(
            group.compute or self.compute,
            group.slow * self.slow.get(rank, 1.0),
            group.transient or self.transient,
            self.links.get(rank) or group.link or self.link,
            group.drift or self.drift,
        )

    def _check_groups(self) -> None:
        total = sum(group.count for group in self.group)
        remedy = "Leave out workers: it is the sum of the groups."
        ok = not self.group or total == self.workers
        require(ok, f"the groups count {total} workers, and workers differs", self.workers, remedy)

    def _check_ranks(self) -> None:
        named: dict[str, Iterable[int]] = {
            "slow": self.slow,
            "links": self.links,
            "event": [e.rank for e in self.event],
        }
        for what, ranks in named.items():
            for rank in ranks:
                remedy = f"Ranks here are 0..{self.workers - 1}."
                require(0 <= rank < self.workers, f"{what} names a rank that does not exist", rank, remedy)
        for rank, factor in self.slow.items():
            _check_slow(f"rank {rank}", factor)

    @property
    def _worker_links(self) -> list[Link]:
        """Those of workers, as far as they cost anything."""
        links = [self.link, *self.links.values(), *(group.link for group in self.group if group.link)]
        return [link for link in links if link != Link()]

    def _check_links(self) -> None:
        links: list[Link | Host] = [*self._worker_links, *self.racks.values(), *self.host]
        rates = [link.bandwidth_bytes_per_s for link in links if link.bandwidth_bytes_per_s is not None]
        if rates and self.model_bytes is None:
            raise ConfigError(
                f"a link has bandwidth_bytes_per_s={rates[0]:g} but the model's size is unknown. "
                "Set model_bytes, or leave the bandwidth out."
            )


def _check_slow(whom: str, factor: float) -> None:
    remedy = "2.5 computes two and a half times slower; below 1 is faster."
    require(0 < factor < inf, f"slow factor of {whom} must be > 0", factor, remedy)


def _check_membership(events: tuple[Membership, ...]) -> None:
    """Nobody can be killed while away, nor join while present."""
    present: dict[int, bool] = {}
    for event in sorted(events, key=lambda event: event.at_s):
        joins, rank = event.join is not None, event.rank
        what = f"rank {rank} {'joins while present' if joins else 'is killed while away'}"
        require(present.get(rank) is not joins, what, event.at_s, "Let kill and join of a rank alternate.")
        present[rank] = joins


def _apportion(total: int, counts: list[int]) -> list[int]:
    """Split a total by the shares of `counts`; what rounding leaves goes to the largest remainders."""
    whole = sum(counts)
    parts = [total * count // whole for count in counts]
    order = sorted(range(len(counts)), key=lambda i: -(total * counts[i] % whole))
    for i in order[: total - sum(parts)]:
        parts[i] += 1
    return parts
