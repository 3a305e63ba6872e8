"""Asynchronous decentralised SGD: a worker averages with one neighbour at a time, and waits for nobody.

Paper: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018.

Promise: nobody ever waits; one averaging leaves the sum of the two models as it was.

When: there is no store, workers are unequal, and nobody may wait.

Invariant: the sum of all models changes by the workers' own steps only. What others average belongs to the
published copy of a worker's model; it computes on another, and takes the published one over when it comes
with its next step, which was computed on what is older by then. Exchanges are carried out one by one, so
none can wait for another in a circle, and any graph will do; the paper needs a bipartite one.

As in the paper a worker computes while its model is averaged: its gradient is of the weights before that, and
is applied to the averaged ones. An iteration takes as long as computing or an exchange, whichever is longer.
Here averaging begins with every step; in the paper it goes on by itself, as often as it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from paceline.protocols.core.operations import Compute, Exchange, Rule, Start, Step, Steps, Wait
from paceline.protocols.core.peer import Me, Peer
from paceline.protocols.core.topology import Topology


@dataclass(frozen=True, slots=True)
class ADPSGD(Peer):
    topology: Literal["ring", "exponential", "complete"] = "ring"
    """Whom a worker may average with: the two beside it, those 1, 2, 4, ... ranks away, or anybody."""
    overlap: bool = True
    """Average while the next gradient is computed, as the paper has it; false: one after the other."""

    @property
    def free(self) -> bool:
        return True

    @property
    def repeats(self) -> bool:
        return False

    @property
    def adds_moves(self) -> bool:
        return True

    @property
    def sends_ahead(self) -> bool:
        return self.overlap

    def start(self, me: Me) -> None:
        me.private.averaging = None

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        if me.private.averaging is None:
            averaged = me.parameters.clone()
        else:
            averaged = yield Wait(me.private.averaging)
        before = me.parameters.clone()
        yield Step(gradient)
        moved = me.parameters - before
        me.parameters[:] = averaged + moved
        exchange = Exchange(moved, Rule.GOSSIP, me.rank, self.neighbour(me))
        if self.overlap:
            me.private.averaging = yield Start(exchange)
        else:
            me.parameters[:] = yield exchange

    def settle(self, me: Me) -> Steps:
        if me.private.averaging is not None:
            me.parameters[:] = yield Wait(me.private.averaging)
            me.private.averaging = None

    def neighbour(self, me: Me) -> int | None:
        """One of those who are there, drawn at random."""
        rows = Topology(self.topology).rows(sorted({*me.members, me.rank}), 0)
        near = sorted(rows[me.rank].keys() - {me.rank})
        return Random(f"{me.seed}/{me.rank}/{me.count}").choice(near) if near else None

    def cell(self, me: Me) -> int | None:
        return me.rank
