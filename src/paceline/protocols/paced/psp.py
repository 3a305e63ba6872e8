"""Probabilistic Synchronous Parallel: a worker checks a few random others instead of all of them.

Paper: Wang, Catterall, Mortier, "Probabilistic Synchronous Parallel", arXiv 1709.07772, 2017.

Promise: a worker that passes saw `sample` random others, none more than `staleness` behind; no bound on the
gap.

When: there are many workers, and asking all of them before every step is too expensive.

A worker p that has pushed draws `sample` of the others and continues if c_p - c_j <= staleness for all of
them; otherwise it waits and looks again. staleness=0 is the paper's pBSP, staleness > 0 its pSSP. Every push
is applied at once: a sample decides who runs, it does not average gradients.

Invariant: all members of a passing sample satisfy the rule, so the slowest always passes and some
worker can always run. sample=0 decides exactly as ASP, and a sample of all others, looked at again
at every event, exactly as SSP. For less than all others there is no bound on the gap, only a
probability: with m of the n others not lagging, one look passes with C(m, sample) / C(n, sample).

Where we differ: the paper does not say when a waiting worker checks again, nor whom. The settings of
`resample` name the possible readings:
  event  a new sample, whenever a worker pushes, joins or leaves (default; the published ordering)
  fixed  the one sample it drew, until that passes: far slower, but few questions in a network
  poll   a new sample, every `poll_s` seconds: possible without a common table of clocks
A worker never draws itself, so it really checks `sample` others. `pass_fraction` is an extension.

`form=distributed` is the paper's decentralised form. Every worker keeps its own barrier (psp_distributed.py),
asks the workers of its sample for their clocks, and tells the store when it continues. It hears of no events,
so it asks again every `poll_s` seconds: a new sample, or with resample=fixed the workers that lagged. The
clocks it reads are never ahead of the table's, so the invariant holds; a worker notices up to `poll_s` late
that no one in its sample lags any more. Workers read the clocks from their host's copy. The store's process
updates it but decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from paceline.errors import ConfigError
from paceline.protocols.core.base import Verdict
from paceline.protocols.core.clocks import Clocks
from paceline.protocols.paced.psp_barriers import Apart, KeptSample, Poll, Redraw
from paceline.protocols.paced.psp_distributed import PeerBarrier
from paceline.protocols.paced.psp_sampling import chance, may_lag, uniforms

Resample = Literal["event", "fixed", "poll"]
Form = Literal["central", "distributed"]
BARRIERS = {"event": Redraw, "fixed": KeptSample, "poll": Poll}


@dataclass(slots=True)
class PSP:
    lockstep: ClassVar[bool] = False

    sample: int = 2
    """How many others a worker checks (beta in the paper). 0 is ASP, all of them is SSP; a handful is usually
    enough."""
    staleness: int = 0
    """Iterations a worker may be ahead of each worker it checks: 0 is pBSP, more is pSSP."""
    resample: Resample = "event"
    """When a waiting worker draws a new sample: event, fixed (never) or poll; distributed, event is poll."""
    poll_s: float = 0.05
    """Seconds between two checks, with poll or distributed. Usually a fraction of an iteration."""
    pass_fraction: float = 1.0
    """Share of the sample that must not lag. Below 1 one straggler in the sample may be ignored."""
    seed: int = 0
    """Seed of the samples. The same seed and the same order of events give the same decisions."""
    form: Form = "central"
    """Who checks clocks: the store for all (central), or every worker for itself (distributed)."""

    drawn: int = field(init=False, default=0)
    """Random numbers used so far."""
    queries: int = field(init=False, default=0)
    """Clocks checked so far. Without a store workers would have to ask each other this often."""
    barrier: Redraw | KeptSample | Poll | Apart = field(init=False)

    def __post_init__(self) -> None:
        for name in ("sample", "staleness", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"PSP {name} must be >= 0, got {getattr(self, name)}. Use 0 or more.")
        if self.resample not in BARRIERS:
            raise ConfigError(f"PSP cannot resample {self.resample!r}. Use event, fixed or poll.")
        if self.form not in ("central", "distributed"):
            raise ConfigError(f"PSP has no form {self.form!r}. Use central or distributed.")
        if not 0 < self.poll_s < float("inf"):
            raise ConfigError(f"PSP poll_s must be > 0, got {self.poll_s}. Give seconds between two looks.")
        if not 0 < self.pass_fraction <= 1:
            raise ConfigError(
                f"PSP pass_fraction must be in 0..1, got {self.pass_fraction}. 1 is the paper's."
            )
        self.barrier = BARRIERS[self.resample]() if self.form == "central" else Apart()

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        return self.barrier.decide(self, clocks, pushed)

    def own_barrier(self, rank: int) -> PeerBarrier | None:
        """In the distributed form: the barrier with which a worker decides by itself when to continue."""
        if self.form == "central":
            return None
        again: Literal["fixed", "poll"] = "fixed" if self.resample == "fixed" else "poll"
        settings = self.sample, self.staleness, again, self.poll_s, self.seed, self.pass_fraction
        return PeerBarrier(rank, *settings)

    def size(self, clocks: Clocks) -> int:
        """How many others a worker checks: `sample`, or all of them if there are fewer."""
        return min(self.sample, len(clocks.active) - 1)

    def allowed(self, size: int) -> int:
        """How many of a sample of that size may lag."""
        return may_lag(size, self.pass_fraction)

    def chance(self, clocks: Clocks, clock: int) -> float:
        """The probability that a worker of that clock passes one look at a new sample."""
        size = self.size(clocks)
        lagging = clocks.count_below(clock - self.staleness)
        return chance(lagging, len(clocks.active) - 1, size, self.allowed(size))

    def uniform(self) -> float:
        """The next random number of this protocol's stream, in [0, 1)."""
        self.drawn = number = self.drawn + 1
        return uniforms(self.seed, number >> 10)[number & 1023]
