"""Probabilistic Synchronous Parallel without a store: a worker asks a few peers how far they are.

Paper: Wang, Catterall, Mortier, "Probabilistic Synchronous Parallel", arXiv 1709.07772, 2017, its
fully distributed form. Each worker knows its own clock and who takes part; no process knows all clocks.

Invariant: a worker continues only when every peer of its sample has replied with a clock at most `staleness`
behind its own. A reply may be old when it arrives. Clocks only rise, so an old reply can make a worker wait
longer, and can never let it pass against the rule.

Where we differ: the paper samples through a structured overlay (random keys, routed to the node
responsible). Here the members are known, and the caller passes in what sends the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from paceline.errors import ConfigError
from paceline.protocols.paced.psp_sampling import draw_sample, may_lag


@dataclass(slots=True)
class PeerBarrier:
    """One worker's barrier. A look is `whom_to_ask`, then the replies, then `hear`."""

    rank: int
    """The worker whose barrier this is."""
    sample: int = 2
    """Peers asked at a barrier."""
    staleness: int = 0
    """Iterations the worker may be ahead of each peer it asked."""
    resample: Literal["fixed", "poll"] = "fixed"
    """Whom a waiting worker asks next: the members of its sample that lagged, or a new sample."""
    poll_s: float = 0.05
    """Seconds between a look that did not pass and the next one."""
    seed: int = 0
    """Seed of the samples; each rank draws its own."""
    pass_fraction: float = 1.0
    """Share of a sample that must not lag."""

    looks: int = field(init=False, default=0)
    """Looks so far, at all barriers."""
    lagging: list[int] = field(init=False, default_factory=list)
    """With a fixed sample: the members this worker still waits for."""
    allowed: int = field(init=False, default=0)
    """How many of the sample may lag."""
    passed: bool = field(init=False, default=True)
    tries: int = field(init=False, default=0)
    """Checks at this barrier, or at the last one that was passed."""
    asked: int = field(init=False, default=0)
    """Questions asked in these checks."""

    def __post_init__(self) -> None:
        if self.sample < 0 or self.staleness < 0:
            raise ConfigError(
                f"a barrier needs sample >= 0 and staleness >= 0, got sample={self.sample}, "
                f"staleness={self.staleness}. Use 0 or more."
            )
        if not 0 < self.poll_s < float("inf"):
            raise ConfigError(
                f"a barrier needs poll_s > 0, got {self.poll_s}. Give seconds between two looks."
            )

    def may_advance(self, clock: int, members: Sequence[int], peer_query: Callable[[int], int]) -> bool:
        """Ask once and return whether the worker may continue. If not, call again `poll_s` seconds later."""
        return self.hear(clock, {peer: peer_query(peer) for peer in self.whom_to_ask(members)})

    def whom_to_ask(self, members: Sequence[int]) -> list[int]:
        """The peers to ask now; `members` are all who take part, this worker among them."""
        if self.passed:  # the next barrier
            self.tries = self.asked = 0
        self.looks, self.tries = self.looks + 1, self.tries + 1
        sample = self._kept(members) if self.lagging else self._drawn(members)
        self.asked += len(sample)
        return sample

    def hear(self, clock: int, replies: Mapping[int, int]) -> bool:
        """Whether a worker at this clock may continue, given the replies, one for each peer asked."""
        lagging = [peer for peer, reply in replies.items() if clock - reply > self.staleness]
        self.passed = len(lagging) <= self.allowed
        self.lagging = lagging if self.resample == "fixed" and not self.passed else []
        return self.passed

    def _kept(self, members: Sequence[int]) -> list[int]:
        """The members of the sample that lagged, without those that have left."""
        present = set(members)
        return [peer for peer in self.lagging if peer in present]

    def _drawn(self, members: Sequence[int]) -> list[int]:
        size = min(self.sample, len(members) - 1)
        self.allowed = may_lag(size, self.pass_fraction)
        random = Random(f"{self.seed}, {self.rank}, {self.looks}")
        return draw_sample(members, self.rank, size, random.random)


def own_barrier(protocol: object, rank: int) -> PeerBarrier | None:
    """The worker's own barrier under this protocol; None if the store decides."""
    make: Callable[[int], PeerBarrier | None] | None = getattr(protocol, "own_barrier", None)
    return None if make is None else make(rank)
