"""Who mixes with whom, and how much: a pure function of the members and the step.

A topology is data, not a matrix: rows of a matrix that are renormalised after a death no longer
have columns that sum to 1, and the mean of all replicas would drift. Asked again with the members
that are left, a topology gives rows and columns that both sum to 1, whoever is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    def rows(self, members: Sequence[int], step: int) -> Rows:
        """Everybody's shares at this step."""
        if self.kind == "matching":
            return _matching(members, Random(f"{self.seed}/{step}"))
        if self.kind == "graph":
            return _graph(members, self.edges)
        return _circulant(members, self._offsets(len(members), step))

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
    """Per rank, everybody whose values reach it or are reached by its own, over any number of hops."""
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
    """Refuse a graph on which the workers would never come to agree, or would lose their mean."""
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
            f"the graph is not connected: nothing that rank 0 learns ever reaches rank {min(apart)}. "
            "Add an edge."
        )


def _circulant(members: Sequence[int], offsets: Sequence[int]) -> Rows:
    size, share = len(members), 1.0 / (len(offsets) + 1)
    return {
        member: {member: share} | {members[(i + far) % size]: share for far in offsets}
        for i, member in enumerate(members)
    }


def _matching(members: Sequence[int], random: Random) -> Rows:
    """Pairs drawn at random; of an odd number, one stays alone."""
    drawn = list(members)
    random.shuffle(drawn)
    rows: Rows = {member: {member: 1.0} for member in members}
    for one, other in zip(drawn[::2], drawn[1::2], strict=False):
        rows[one], rows[other] = {one: 0.5, other: 0.5}, {other: 0.5, one: 0.5}
    return {member: rows[member] for member in members}


def _graph(members: Sequence[int], edges: Iterable[tuple[int, int, float | None]]) -> Rows:
    """Hastings' rule where no share is given: one over the larger degree, oneself counted."""
    there = set(members)
    kept = {(min(a, b), max(a, b)): share for a, b, share in edges if a in there and b in there}
    degree = {member: 1 + sum(member in pair for pair in kept) for member in members}
    rows: Rows = {member: {} for member in members}
    for (one, other), given in kept.items():
        share = 1.0 / max(degree[one], degree[other]) if given is None else given
        rows[one][other] = rows[other][one] = share
    return {member: {member: 1.0 - fsum(row.values())} | row for member, row in rows.items()}
