"""Which workers mix with each other, and with which shares: a pure function of the members and the step.

A topology is data, not a matrix: rows of a matrix that are renormalised after a death no longer
have columns that sum to 1, and the mean of all replicas would drift. Asked again with the members
that are left, a topology gives rows and columns that both sum to 1, whoever is left.

Of a step that some have mixed at already, those rows have to stay. So members may be *absent* from a step:
rows and columns of the others still sum to 1, and only rows of those change who would have taken from an
absent one. What a worker gets then depends on who is absent, and not on when that was known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import fsum
from random import Random
from typing import Literal

import msgspec

from paceline.errors import ConfigError

Rows = dict[int, dict[int, float]]
"""Per rank: whose values it takes, with their shares, its own included."""
Kind = Literal["ring", "exponential", "one_peer", "matching", "complete", "graph"]


class Topology(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rule for mixing. Every row and every column sums to 1 at every step, for any members."""

    kind: Kind
    seed: int = 0
    edges: tuple[tuple[int, int, float | None], ...] = ()
    """Of a given graph: two ranks, and the share each takes of the other; None: by their degrees."""

    def rows(self, members: Sequence[int], step: int, absent: Collection[int] = ()) -> Rows:
        """All ranks' shares at this step, except for absent members."""
        if self.kind == "complete":  # nobody has mixed without them
            members, absent = [rank for rank in members if rank not in absent], ()
        if self.kind == "graph":
            return _left_to_oneself(_graph(members, self.edges), absent)
        if self.kind == "matching":
            drawn = _matching(members, Random(f"{self.seed}/{step}"))
        else:
            drawn = _circulant(members, self._offsets(len(members), step))
        return _shared_out(members, [_passed_over(each, absent) for each in drawn], absent)

    def _offsets(self, size: int, step: int) -> list[int]:
        """How far away those are whose values a member takes, itself left out."""
        if self.kind == "complete":
            return list(range(1, size))
        if self.kind == "ring":
            return sorted({1 % size, -1 % size} - {0})
        powers = [2**k for k in range((size - 1).bit_length())]
        if self.kind == "one_peer" and powers:
            return [powers[step % len(powers)]]
        return powers


def parts(rows: Rows) -> dict[int, frozenset[int]]:
    """Per rank: all ranks that it is connected with, over any number of hops."""
    near: dict[int, set[int]] = {member: set() for member in rows}
    for one, row in rows.items():
        for other in row:
            near[one].add(other)
            near[other].add(one)
    found: dict[int, frozenset[int]] = {}
    for rank in rows:
        if rank not in found:
            part = frozenset(_reached(near, rank))
            found |= dict.fromkeys(part, part)
    return found


def _reached(near: dict[int, set[int]], rank: int) -> set[int]:
    found, new = {rank}, {rank}
    while new:
        new = {other for one in new for other in near[one]} - found
        found |= new
    return found


def parse_graph(text: str) -> tuple[tuple[int, int, float | None], ...]:
    """`0-1,1-2:0.25` are two edges, the second with a share of its own."""
    edges = []
    for item in (part.strip() for part in text.split(",") if part.strip()):
        ends, _, share = item.partition(":")
        one, dash, other = ends.partition("-")
        try:
            edges.append((int(one), int(other), float(share) if share else None))
        except ValueError:
            dash = ""
        if not dash:
            raise ConfigError(f"a graph is written as 0-1,1-2,2-0 (or 0-1:0.25 with a share), got {item!r}.")
    return tuple(edges)


def check_graph(edges: Iterable[tuple[int, int, float | None]], workers: int) -> None:
    """Refuse a graph on which the workers would never agree, or would not keep their mean."""
    edges = tuple(edges)
    for one, other, _ in edges:
        if one == other or not (0 <= one < workers and 0 <= other < workers):
            raise ConfigError(
                f"the graph has an edge {one}-{other}, but the {workers} workers are ranks 0 to "
                f"{workers - 1}, and a worker is its own neighbour without saying so. Name two of them."
            )
    rows = _graph(range(workers), edges)
    for rank, row in rows.items():
        if min(row.values()) < 0:
            given = 1.0 - row[rank]
            raise ConfigError(
                f"the shares of rank {rank} add up to {given:g}, so nothing is left of its own and the "
                "mixing matrix is not doubly stochastic. Let each rank's shares add up to at most 1."
            )
    apart = set(range(workers)) - parts(rows)[0]
    if apart:
        raise ConfigError(
            f"the graph is not connected: updates of rank 0 never reach rank {min(apart)}. Add an edge."
        )


Taking = dict[int, int]
"""Per rank: the other rank whose values it takes, or its own again. No rank's values are taken twice."""


def _circulant(members: Sequence[int], offsets: Sequence[int]) -> list[Taking]:
    size = len(members)
    return [{member: members[(i + far) % size] for i, member in enumerate(members)} for far in offsets]


def _matching(members: Sequence[int], random: Random) -> list[Taking]:
    """Pairs drawn at random; of an odd number, one stays alone."""
    drawn = list(members)
    random.shuffle(drawn)
    pairs = list(zip(drawn[::2], drawn[1::2], strict=False))
    return [dict(pairs) | {other: one for one, other in pairs}]


def _passed_over(taking: Taking, absent: Collection[int]) -> Taking:
    """A rank that took from an absent one takes what the absent one would have taken."""
    kept = {}
    for rank, source in taking.items():
        while source in absent and source != rank:
            source = taking[source]
        if rank not in absent:
            kept[rank] = source
    return kept


def _shared_out(members: Sequence[int], takings: Sequence[Taking], absent: Collection[int]) -> Rows:
    """Equal shares of the rank's own values and of those it takes."""
    share = 1.0 / (len(takings) + 1)
    rows: Rows = {}
    for member in (rank for rank in members if rank not in absent):
        sources = Counter(taking.get(member, member) for taking in takings)
        own = share * (1 + sources.pop(member, 0))
        rows[member] = {member: own} | {source: share * times for source, times in sources.items()}
    return rows


def _left_to_oneself(rows: Rows, absent: Collection[int]) -> Rows:
    """For symmetric shares: a rank replaces the share of an absent one by its own values."""
    kept: Rows = {}
    for rank, row in rows.items():
        if rank not in absent:
            gone = [row[other] for other in sorted(row) if other in absent]
            kept[rank] = {other: share for other, share in row.items() if other not in absent}
            kept[rank][rank] += fsum(gone)
    return kept


def _graph(members: Sequence[int], edges: Iterable[tuple[int, int, float | None]]) -> Rows:
    """Hastings' rule if no share is given: one over the larger degree, counting the rank itself."""
    there = set(members)
    kept = {(min(a, b), max(a, b)): share for a, b, share in edges if a in there and b in there}
    degree = {member: 1 + sum(member in pair for pair in kept) for member in members}
    rows: Rows = {member: {} for member in members}
    for (one, other), given in kept.items():
        share = 1.0 / max(degree[one], degree[other]) if given is None else given
        rows[one][other] = rows[other][one] = share
    return {member: {member: 1.0 - fsum(row.values())} | row for member, row in rows.items()}
