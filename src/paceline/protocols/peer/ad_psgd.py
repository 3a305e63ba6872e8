"""Asynchronous decentralised SGD: a worker averages with one neighbour at a time and never waits.

Paper: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018.

Promise: no worker ever waits; one averaging leaves the sum of the two models as it was.

When: there is no store, workers are unequal, and no worker may wait.

Invariant: the sum of all models changes only by the workers' own steps. Others average with the published
copy of a worker's model. The worker computes on a second copy and adopts the published one when it comes with
its next step, which was therefore computed on older weights. Exchanges are carried out one by one, so they
cannot wait for each other in a circle and any graph works; the paper needs a bipartite one.

As in the paper a worker computes while its model is averaged: it computes its gradient on the weights before
the averaging and applies it to the averaged ones. An iteration takes as long as the longer of computing and
exchanging. Here averaging starts with every step; in the paper it repeats by itself, as often as it can.
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
    """Whom a worker may average with: its two neighbours, those 1, 2, 4, ... ranks away, or any worker."""
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
        """A random worker among those that are present."""
        rows = Topology(self.topology).rows(sorted({*me.members, me.rank}), 0)
        near = sorted(rows[me.rank].keys() - {me.rank})
        return Random(f"{me.seed}/{me.rank}/{me.count}").choice(near) if near else None

    def cell(self, me: Me) -> int | None:
        return me.rank
