"""DiLoCo: long local training, then one outer step of Nesterov SGD along the mean displacement.

Paper: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023;
the details as in OpenDiLoCo (Jaghouar et al., 2024), fragments and delay as in torchft.

Promise: after every outer step all replicas are equal, with one exchange per `period` iterations.

When: links are so slow that one exchange per hundreds of iterations must be enough.

Invariant: snapshot and outer momentum are the same on all workers after every outer step; every worker makes
that step by itself. The outer rule is that of torch.optim.SGD(nesterov=True): momentum begins as the first
displacement. With lr=1 and momentum=0 this is local SGD. Inner optimizers keep their state. Displacements
count equally, as in OpenDiLoCo, unless `weights` says by samples (the paper's weighting of unequal shards).
With one worker this is *not* plain training, because the outer step still acts.

Streaming: `fragments` cuts the list of tensors into that number of runs of about equal bytes. Every
period/fragments iterations the next one has its outer step, in rotation. After its outer step a fragment is
equal on all replicas; all fragments are never equal at once. Float buffers are averaged with the last
fragment.

Delay: with `delay` an average travels for that number of iterations while training continues; then the outer
step is made. The replica becomes the new snapshot, and its progress meanwhile is lost except for the share
`alpha`, as published. With a delay of a whole period nothing is lost: the displacement of a round is sent at
its end and applied at the end of the next round, as in HPSGD. With lr=1 and momentum=0 it equals HPSGD. When
a run ends, vectors that are still under way are applied, and the progress since they were sent is kept on
top.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Literal

from paceline.errors import ConfigError
from paceline.protocols.core.operations import Average, Compute, Start, Step, Steps, Vector, Wait
from paceline.protocols.core.parts import Part
from paceline.protocols.core.peer import Me, Peer, average_buffers
from paceline.protocols.peer.outer import begin, check_period


@dataclass(frozen=True, slots=True)
class DiLoCo(Peer):
    period: int = 500
    """Inner iterations between two outer steps."""
    lr: float = 0.7
    """Learning rate of the outer step; 1 takes the whole mean displacement."""
    momentum: float = 0.9
    """Nesterov momentum of the outer step."""
    weights: Literal["uniform", "samples"] = "uniform"
    """Whether all displacements count equally, or by the worker's samples since the last outer step."""
    fragments: int = 1
    """Number of parts of the model that take turns with their outer steps, each once per period (streaming
    DiLoCo)."""
    delay: int = 0
    """Iterations for which an average travels while training continues. With `period` the outer step is made
    one round later."""
    alpha: float = 0.0
    """Share of its own values that a worker keeps at an outer step. 0: it takes the common values."""

    def __post_init__(self) -> None:
        check_period("DiLoCo", self.period)
        if not 0 < self.lr < float("inf") or not 0 <= self.momentum < 1:
            raise ConfigError(
                f"DiLoCo needs a finite lr > 0 and momentum in [0, 1), got lr={self.lr:g}, "
                f"momentum={self.momentum:g}."
            )
        if self.fragments < 1 or self.period % self.fragments:
            raise ConfigError(
                f"DiLoCo synchronises one of its fragments every period/fragments iterations, got period="
                f"{self.period}, fragments={self.fragments}. Let the period be a multiple of the fragments."
            )
        if not 0 <= self.delay <= self.period:
            raise ConfigError(
                f"DiLoCo delay is a number of iterations from 0 to the period, got {self.delay} with "
                f"period={self.period}."
            )
        if not 0 <= self.alpha < 1 or (self.alpha and self.delay == self.period):
            raise ConfigError(
                "DiLoCo alpha is a share in [0, 1), and 0 with a delay of a whole period, where all that a "
                f"worker has done is sent off; got alpha={self.alpha:g}, delay={self.delay}."
            )

    @property
    def plain_alone(self) -> bool:
        return False

    @property
    def in_parts(self) -> bool:
        return self.fragments > 1

    @property
    def sends_ahead(self) -> bool:
        return self.delay > 0

    @property
    def settles(self) -> bool:
        return self.delay > 0

    def remarks(self, workers: int) -> list[str]:
        if self.delay < self.period or self.momentum <= 0.5:
            return []
        return [
            f"diloco: outer steps a whole round late with momentum {self.momentum:g} overshoot, as momentum "
            "with a delay does. Use at most 0.5, or a delay shorter than the period"
        ]

    def start(self, me: Me) -> None:
        begin(me)
        me.agreed.momentum = me.parameters * 0.0 if self.fragments > 1 else None
        me.private.samples, me.private.counted = 0, [0] * self.fragments
        if self.fragments > 1:
            fragments_of(me.tensors.sizes, self.fragments)
        if self.delay:
            me.private.base, me.private.under_way = me.parameters.clone(), []

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        yield Step(gradient)
        me.private.samples += me.samples
        due = self.due(me.count + 1)
        moved = None if due is None else self.base(me) - me.parameters
        while self.delay and me.private.under_way and me.private.under_way[0][0] <= me.count + 1:
            yield from self.arrive(me, self.alpha)
        if due is not None:
            yield from self.synchronise(me, due, moved)

    def due(self, iteration: int) -> int | None:
        """The fragment whose turn it is after an iteration, counted from 1."""
        turn, off = divmod(iteration, self.period // self.fragments)
        return None if off else (turn - 1) % self.fragments

    def base(self, me: Me) -> Vector:
        """The values from which displacements are counted."""
        base: Vector = me.private.base if self.delay else me.agreed.snapshot
        return base

    def synchronise(self, me: Me, fragment: int, moved: Vector | None) -> Steps:
        """Average the displacements of all workers in a fragment, now or in the background."""
        assert moved is not None
        part, counted = self.part(me, fragment), me.private.counted
        weight = me.private.samples - counted[fragment] if self.weights == "samples" else 1.0
        counted[fragment] = me.private.samples
        average = Average(moved, weight=weight, part=part)
        if not self.delay:
            self.outer_step(me, (yield average), part)
            self.adopt(me, part, self.alpha)
        else:
            handle = yield Start(average)
            me.private.under_way.append((me.count + 1 + self.delay, fragment, handle))
            put(me, me.parameters, me.private.base, part)
        if fragment == self.fragments - 1:
            yield from average_buffers(me, weight=weight)

    def arrive(self, me: Me, alpha: float) -> Steps:
        """Make an outer step with the oldest average under way."""
        _, fragment, handle = me.private.under_way.pop(0)
        part = self.part(me, fragment)
        self.outer_step(me, (yield Wait(handle)), part)
        self.adopt(me, part, alpha)
        put(me, me.agreed.snapshot, me.private.base, part)

    def outer_step(self, me: Me, mean: Vector, part: Part | None = None) -> None:
        """Nesterov's rule on the mean displacement."""
        agreed = me.agreed
        if agreed.momentum is None:
            agreed.momentum = mean.clone()
        else:
            put(me, self.momentum * agreed.momentum + mean, agreed.momentum, part)
        moved = self.lr * (mean + self.momentum * agreed.momentum)
        put(me, agreed.snapshot - moved, agreed.snapshot, part)
        me.after_step(agreed.snapshot)

    def adopt(self, me: Me, part: Part | None, alpha: float) -> None:
        """Set the replica to the snapshot, except for the share it keeps."""
        kept = alpha * me.parameters + (1 - alpha) * me.agreed.snapshot if alpha else me.agreed.snapshot
        put(me, kept, me.parameters, part)

    def part(self, me: Me, fragment: int) -> Part | None:
        """The tensors of a fragment; None: all."""
        if self.fragments == 1:
            return None
        return fragments_of(me.tensors.sizes, self.fragments)[fragment]

    def settle(self, me: Me) -> Steps:
        """Apply what is under way, and keep the progress since it was sent."""
        if not self.delay:
            return
        since = me.parameters - me.private.base
        reached = {fragment for _, fragment, _ in me.private.under_way}
        while me.private.under_way:
            yield from self.arrive(me, 0.0)
        for fragment in sorted(reached):
            part = self.part(me, fragment)
            put(me, me.parameters + since, me.parameters, part)


def put(me: Me, source: Vector, target: Vector, part: Part | None) -> None:
    """Write some tensors of one vector to another; None: all."""
    if part is None:
        target[:] = source
    else:
        me.tensors.copy(source, target, part)


@cache
def fragments_of(sizes: tuple[int, ...], count: int) -> tuple[Part, ...]:
    """Cut the list of tensors into `count` runs of about equal bytes."""
    if count > len(sizes):
        raise ConfigError(
            f"DiLoCo cuts a model between its tensors, and this one has {len(sizes)}, fewer than fragments="
            f"{count}. Use at most {len(sizes)} fragments."
        )
    total, ends = list(accumulate(sizes)), [0]
    for number in range(1, count):
        least, most = ends[-1] + 1, len(sizes) - (count - number)
        wanted = total[-1] * number / count
        ends.append(min(range(least, most + 1), key=lambda end: abs(total[end - 1] - wanted)))
    runs = [range(start, stop) for start, stop in zip(ends, [*ends[1:], len(sizes)], strict=True)]
    return tuple(Part(tuple(run), sum(sizes[tensor] for tensor in run)) for run in runs)
