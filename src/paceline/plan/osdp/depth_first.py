"""The paper's own search: depth first, branches cut by memory and by time. The reference for the knapsack.

Identical operators are merged, so that counts are decided and not identities. Exact to the byte, and
exponential in the worst case: for tests and small models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

from paceline.plan.osdp.knapsack import Options, Solution, measured
from paceline.plan.osdp.options import Option


def search(options: Options, limit: int) -> Solution | None:
    """The fastest plan within the limit; among equals the one that takes the least memory."""
    groups: dict[tuple[Option, ...], list[int]] = {}
    for place, each in enumerate(options):
        groups.setdefault(tuple(each), []).append(place)
    found = _Search(list(groups), [len(places) for places in groups.values()], limit).run()
    if found is None:
        return None
    chosen: list[Option | None] = [None] * len(options)
    for places, picked in zip(groups.values(), found, strict=True):
        for place, option in zip(places, picked, strict=True):
            chosen[place] = option
    return measured([option for option in chosen if option is not None])


class _Search:
    def __init__(self, kinds: list[tuple[Option, ...]], counts: list[int], limit: int) -> None:
        self.kinds, self.counts, self.limit = kinds, counts, limit
        self.best: tuple[float, int] = (float("inf"), 0)
        self.found: list[tuple[Option, ...]] | None = None
        self.least_memory, self.least_time = [0], [0.0]
        for kind, count in zip(reversed(kinds), reversed(counts), strict=True):
            self.least_memory.append(self.least_memory[-1] + count * min(o.memory for o in kind))
            self.least_time.append(self.least_time[-1] + count * min(o.seconds for o in kind))

    def run(self) -> list[tuple[Option, ...]] | None:
        self._visit(0, 0.0, 0, 0, [])
        return self.found

    def _visit(self, at: int, seconds: float, held: int, surge: int, path: list[tuple[Option, ...]]) -> None:
        rest = len(self.kinds) - at
        if held + surge + self.least_memory[rest] > self.limit:
            return
        if (seconds + self.least_time[rest], held + surge + self.least_memory[rest]) >= self.best:
            return
        if not rest:
            self.best, self.found = (seconds, held + surge), list(path)
            return
        for picked in _ways(self.kinds[at], self.counts[at]):
            path.append(picked)
            self._visit(
                at + 1,
                seconds + sum(o.seconds for o in picked),
                held + sum(o.memory for o in picked),
                max(surge, *(o.surge for o in picked)),
                path,
            )
            path.pop()


def _ways(kind: Sequence[Option], count: int) -> Iterator[tuple[Option, ...]]:
    """How many of the identical operators take each option; the fastest first."""
    yield from combinations_with_replacement(sorted(kind, key=lambda o: o.seconds), count)
