"""Decentralised parallel SGD: every worker mixes its model only with its neighbours' models.

Paper: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017;
random matching as in Zhang et al., arXiv 2112.01433.

Promise: mixing never changes the mean of all replicas; each exchanges with few neighbours per step, and waits
for nobody else.

When: the network is a graph of neighbours, or many workers must manage with a few exchanges per step.

Invariant: the mean follows the mean of the gradients exactly, whatever the topology: rows and columns of the
mixing matrix sum to 1 at every step, also after a worker died. `combine_then_adapt` is the paper's: the
gradient is taken at the replica's own weights while they are mixed. `adapt_then_combine` mixes the weights
after the step; on a complete graph that is BSP for SGD (the other order is not). With any optimizer the step
is added to the mixture as a displacement. Workers wait only for those they mix with, except a worker that is
more than `ahead` steps ahead of the slowest: it waits for the slowest. The paper has no such bound. Ours
limits memory, because a worker keeps vectors that others may still need. Float buffers stay each worker's
own.

Measured (Zhang et al.): while replicas differ, the mean moves as if the learning rate adjusted itself to the
landscape. With g the gradient of all batches at the mean, and h the mean of the gradients that the replicas
took at their own parameters, `effective_lr` is <h, g> / <g, g>, the share of the learning rate that acts
along g; what is left is noise. On equal replicas it is 1. Measuring does not change training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError
from paceline.protocols.core.operations import (
    Agree,
    Average,
    Compute,
    How,
    Mix,
    Probe,
    Start,
    Step,
    Steps,
    Vector,
    Wait,
)
from paceline.protocols.core.peer import Me, Peer
from paceline.protocols.core.topology import Kind, Topology, check_graph, parse_graph


@dataclass(frozen=True, slots=True)
class DPSGD(Peer):
    topology: Kind = "ring"
    """Who mixes: ring, exponential (1, 2, 4, ... ranks away), one_peer (one of these in turn), matching
    (random pairs), complete, or the given `graph`."""
    order: Literal["combine_then_adapt", "adapt_then_combine"] = "combine_then_adapt"
    """Whether a step is added to the mixture, or mixed with the weights."""
    graph: str = ""
    """Edges of your own graph, as 0-1,1-2,2-0. A share may follow a colon, as 0-1:0.25."""

    overlap: bool | None = None
    """Mix while the gradient is computed, as in the paper. Not given: yes with combine_then_adapt, no
    otherwise."""
    ahead: int = 4
    """How many steps a worker may be ahead of the slowest. Each takes memory for one copy of the model. 0: no
    worker mixes before all have come."""
    measure_every: int = 0
    """Iterations between two measurements of the effective learning rate. Each computes its batch twice and
    averages three vectors. 0: never."""

    def __post_init__(self) -> None:
        if self.overlap and self.order == "adapt_then_combine":
            raise ConfigError(
                "with order=adapt_then_combine the step is mixed along, so nothing can be mixed before it is "
                "computed. Leave overlap out, or use combine_then_adapt."
            )
        if (self.topology == "graph") != bool(self.graph):
            raise ConfigError(
                f"topology={self.topology!r} and graph={self.graph!r} do not fit: "
                "give edges with topology=graph, and only then."
            )
        parse_graph(self.graph)
        if self.ahead < 0:
            raise ConfigError(
                f"DPSGD ahead is a number of steps >= 0, got {self.ahead}. Use 0 for a barrier."
            )
        if self.measure_every < 0:
            raise ConfigError(
                f"DPSGD measure_every is a number of iterations >= 0, got {self.measure_every}."
            )

    @property
    def apart(self) -> bool:
        return True

    @property
    def copies(self) -> int:
        return self.ahead + 2  # of the iteration it is in, of those before, and the mixture

    @property
    def probes(self) -> bool:
        return self.measure_every > 0

    def check(self, workers: int) -> None:
        if self.topology == "graph":
            check_graph(parse_graph(self.graph), workers)

    def iteration(self, me: Me) -> Steps:
        along = self.order == "adapt_then_combine"
        beside = not along if self.overlap is None else self.overlap
        mixing = (yield Start(self.mix(me))) if beside else None
        gradient = yield Compute()
        if self.measure_every and me.count % self.measure_every == 0:
            yield from self.measure(me, gradient)
        if along:
            yield Step(gradient)
            me.parameters[:] = yield self.mix(me)
            return
        mixed = yield Wait(mixing) if mixing else self.mix(me)
        before = me.parameters.clone()
        yield Step(gradient)
        me.parameters[:] = mixed + (me.parameters - before)

    def mix(self, me: Me) -> Mix:
        """Mix this worker's model with its neighbours' models."""
        topology = Topology(self.topology, me.seed, parse_graph(self.graph))
        return Mix(me.parameters, topology, me.count, self.ahead)

    def measure(self, me: Me, gradient: Vector) -> Steps:
        """Measure how far the mean's step points in the direction of the gradient at the mean."""
        own, kept = me.parameters.clone(), gradient.clone()
        taken = (yield Average(gradient)).clone()
        me.parameters[:] = yield Average(me.parameters)
        apart = own - me.parameters
        variance = (yield Agree(apart.dot(apart), How.SUM)) / (yield Agree(1, How.SUM))
        at_mean = yield Average((yield Probe()))
        along, square = taken.dot(at_mean), at_mean.dot(at_mean)
        me.parameters[:], gradient[:] = own, kept
        if square > 0:
            rest = max(0.0, taken.dot(taken) - along * along / square)
            rate = me.rates[0] if me.rates else 1.0
            me.told = {
                "effective_lr": along / square,
                "noise_strength": rate * rate * rest,
                "weight_variance": variance,
            }
