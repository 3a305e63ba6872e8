"""OSP: workers average the important part of a gradient at once, the rest while they compute the next.

Paper: Chen et al., "OSP: Boosting Distributed Model Training with 2-stage Synchronization", ICPP 2023 (arXiv
2306.16926).

Promise: every gradient is averaged and applied exactly once; no worker waits for the deferred part if it
travels within an iteration.

When: a full average takes longer than the backward pass can hide, but fits into one more iteration.

Invariant: the agreed model moves by the mean gradient of every iteration, tensor by tensor, in either stage,
and so does the optimizers' state. A replica differs from the agreed model only in the tensors that are under
way: there it has taken a temporary step with its own gradient (the paper's *local-gradient-based parameter
correction*), which the agreed value replaces before the next step. One worker, or workers with equal
gradients, train exactly as plain PyTorch does for any split, with any optimizer that keeps its state by
tensor. If nothing is deferred this is `allreduce`; if everything is deferred and `preview=none`, it is SGD
delayed by one step. At most one exchange is under way, and all workers split tensors by the same numbers.

Where this differs from the paper, of which only the abstract could be read: there is no server. A tensor's
importance is the mean of |parameter x mean gradient| over its elements. Small tensors are always averaged at
once. The budget is a share of the model that grows with the iterations or as the reported loss falls, and
shrinks while deferred tensors arrive too late. With `budget=times` it follows from two times that are
measured again with every ranking: computing (of the slowest worker) and averaging the whole model (of the
worker that came last, scaled up from the part averaged at once). Then min(overlap, 0.9 x computing /
averaging) of the model is deferred. This share shrinks by a tenth while workers wait for deferred tensors
longer than a hundredth of computing, and grows by 1.02 up to that limit while no worker waits. A deferred
step uses the learning rates of its own iteration. With `preview=ema` (which the paper is said to have
considered and rejected) the worker's own gradient is corrected by the running mean of its difference from the
mean gradient; that takes two more vectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.errors import ConfigError
from paceline.protocols.core.operations import (
    Agree,
    Average,
    Compute,
    How,
    Now,
    Preview,
    Start,
    Step,
    Steps,
    Test,
    Vector,
    Wait,
)
from paceline.protocols.core.parts import Part
from paceline.protocols.core.peer import Me, Peer, average_buffers

SHRINK, GROW = 0.9, 1.02
HIDDEN = 0.9
"""Share of what could travel during an iteration's computing that is deferred."""
TOLERATED = 0.01
"""Waiting for deferred tensors, as a share of computing, that is still tolerated."""


@dataclass(frozen=True, slots=True)
class OSP(Peer):
    agrees: ClassVar[bool] = True

    overlap: float = 0.8
    """Largest share of the model's bytes that is averaged during the next iteration. 0 is allreduce."""
    budget: Literal["fixed", "measured", "times"] = "fixed"
    """How the share is chosen: fixed, reduced while deferred tensors arrive too late to be hidden, or
    computed from the times that computing and averaging take."""
    ramp: Literal["linear", "loss", "constant"] = "linear"
    """How the share grows from 0: with the iterations, as the reported loss falls, or at once after the first
    ranking."""
    ramp_length: int = 200
    """Iterations until the whole share is used (linear), or between two checks of the loss."""
    rank_every: int = 50
    """Iterations between two rankings of the tensors by their importance."""
    preview: Literal["local", "ema", "none"] = "local"
    """What replaces a deferred step for now: a step with the worker's own gradient, with its own gradient
    corrected by its recent difference from the mean, or nothing."""
    ema_decay: float = 0.9
    """Only with preview=ema: how much of the running difference remains with every new one."""
    preview_until: int = 0
    """The iteration from which on there is no preview, because previews bias where training ends. 0: keep
    them."""
    small_bytes: int = 4096
    """Tensors of fewer bytes are never deferred, because they take almost no time."""

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"OSP overlap is a share of the model in [0, 1], got {self.overlap:g}.")
        if self.ramp_length < 1 or self.rank_every < 1:
            raise ConfigError(
                f"OSP ramp_length and rank_every are iterations >= 1, got {self.ramp_length} "
                f"and {self.rank_every}."
            )
        if self.preview_until < 0 or self.small_bytes < 0:
            raise ConfigError(
                f"OSP preview_until and small_bytes must be >= 0, got {self.preview_until} "
                f"and {self.small_bytes}."
            )

        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"OSP ema_decay is a share in [0, 1), got {self.ema_decay:g}.")

    @property
    def sends_ahead(self) -> bool:
        return True

    @property
    def repeats(self) -> bool:
        return self.budget == "fixed"

    @property
    def plain_alone(self) -> bool:
        return self.preview != "none" and not self.preview_until

    @property
    def in_parts(self) -> bool:
        return self.overlap > 0

    @property
    def level(self) -> bool:
        """Whether nothing is deferred, as in all-reduce. Deferred tensors are averaged by samples later, and
        not every fabric can start an average of no samples."""
        return self.overlap == 0

    def start(self, me: Me) -> None:
        me.private.base = me.keep(me.parameters)
        me.private.split = False
        me.private.under_way = None
        me.private.late, me.private.losses = 0, []
        if self.preview == "ema":
            me.private.apart, me.private.own = me.parameters * 0.0, me.parameters * 0.0
        me.private.waited_s, me.private.compute_s, me.private.average_s = 0.0, 0.0, 0.0
        me.agreed.hidden = 1.0
        me.agreed.room, me.agreed.grown, me.agreed.first_loss = 1.0, 0.0, None
        me.agreed.scores = {}
        me.agreed.later, me.agreed.now = _parts(me, ())

    def iteration(self, me: Me) -> Steps:
        ranks = (me.count + 1) % self.rank_every == 0 and self.overlap > 0
        timed = ranks and self.budget == "times"
        began = (yield Now()) if timed else 0.0
        gradient = yield Compute()
        if timed:
            me.private.compute_s = (yield Now()) - began
        yield from self.install(me, ranks)
        yield from self.synchronise(me, gradient, ranks)
        if me.private.split or me.agreed.later.tensors:
            me.private.split = True
            me.private.base[:] = me.parameters
        if me.agreed.later.tensors:
            yield from self.put_off(me, gradient)
        if self.ramp == "loss":
            yield from self.look_at_loss(me)
        if ranks:
            yield from self.rank(me)

    def install(self, me: Me, ranks: bool = False) -> Steps:
        """Replace the preview by the agreed values of the deferred tensors."""
        if me.private.under_way is None:
            return
        (handle, part, rates), me.private.under_way = me.private.under_way, None
        arrived = self.budget == "fixed" or (yield Test(handle))
        me.private.late += not arrived
        timed = self.budget == "times" and not arrived
        began = (yield Now()) if timed else 0.0
        mean = yield Wait(handle)
        if timed:
            mean = mean.clone()  # it has to outlast the question
            me.private.waited_s += (yield Now()) - began
        if self.preview == "ema":
            memory, new = me.private, (1 - self.ema_decay) * (mean - me.private.own)
            me.tensors.copy(self.ema_decay * memory.apart + new, memory.apart, part)
        me.tensors.copy(me.private.base, me.parameters, part)
        if ranks:
            me.agreed.scores |= me.tensors.scores(me.parameters, mean, part)
        yield Step(mean, part, rates)

    def synchronise(self, me: Me, gradient: Vector, ranks: bool) -> Steps:
        """The important tensors, now and together."""
        now, split = me.agreed.now, bool(me.agreed.later.tensors)
        if split and not now.tensors:
            return
        timed = ranks and self.budget == "times"
        began = (yield Now()) if timed else 0.0
        mean = yield Average(gradient, weight=me.samples, part=now if split else None)
        if timed:
            mean = mean.clone()  # it has to outlast the question
            me.private.average_s = (yield Now()) - began
        if ranks:
            me.agreed.scores |= me.tensors.scores(me.parameters, mean, now)
        yield Step(mean, now if split else None)

    def put_off(self, me: Me, gradient: Vector) -> Steps:
        """Send the rest, and preview its step meanwhile."""
        part = me.agreed.later
        handle = yield Start(Average(gradient, weight=me.samples, part=part))
        me.private.under_way = handle, part, me.rates
        if self.preview != "none" and (me.count < self.preview_until or not self.preview_until):
            yield Preview(self.stand_in(me, gradient), part)

    def stand_in(self, me: Me, gradient: Vector) -> Vector:
        """The stand-in for the mean gradient until it arrives."""
        if self.preview != "ema":
            return gradient
        me.private.own[:] = gradient
        guess = gradient.clone()  # which parameters have none is the gradient's to say
        guess[:] = gradient + me.private.apart
        return guess

    # -- what is put off ----------------------------------------------------------------------

    def rank(self, me: Me) -> Steps:
        """Split again: defer the least important tensors that fit into the budget."""
        if self.budget == "measured":
            late = yield Agree(me.private.late, How.MAX)
            room = me.agreed.room * (SHRINK if late else GROW)
            me.private.late, me.agreed.room = 0, min(1.0, room)
        elif self.budget == "times":
            yield from self.follow_times(me)
        sizes, scores = me.tensors.sizes, me.agreed.scores
        budget, chosen = self.share(me) * sum(sizes), []
        for tensor in sorted(range(len(sizes)), key=lambda each: (scores.get(each, 0.0), each)):
            if self.small_bytes <= sizes[tensor] <= budget:
                budget -= sizes[tensor]
                chosen.append(tensor)
        me.agreed.later, me.agreed.now = _parts(me, chosen)

    def follow_times(self, me: Me) -> Steps:
        """Adjust the share to what can travel while all workers compute."""
        memory, agreed, now = me.private, me.agreed, me.agreed.now
        compute_s = yield Agree(memory.compute_s, How.MAX)
        average_s = yield Agree(memory.average_s, How.MIN)
        waited_s = (yield Agree(memory.waited_s, How.MAX)) / self.rank_every
        if now.tensors:
            whole_s = average_s * sum(me.tensors.sizes) / now.size_bytes
            agreed.hidden = HIDDEN * compute_s / whole_s if whole_s > 0 else 1.0
        if waited_s > TOLERATED * compute_s:
            agreed.room *= SHRINK
        elif waited_s == 0:
            agreed.room = min(1.0, agreed.room * GROW)
        memory.waited_s = 0.0

    def share(self, me: Me) -> float:
        """The share of the model that may be deferred."""
        grown = 1.0
        if self.ramp == "linear":
            grown = min(1.0, (me.count + 1) / self.ramp_length)
        elif self.ramp == "loss":
            grown = me.agreed.grown
        if self.budget == "times":
            return float(min(self.overlap, me.agreed.room * me.agreed.hidden) * grown)
        return float(self.overlap * me.agreed.room * grown)

    def look_at_loss(self, me: Me) -> Steps:
        """How far the loss has fallen since the first check, as a share."""
        if me.loss is not None:
            me.private.losses.append(me.loss)
        if me.count == 0 or me.count % self.ramp_length:
            return
        losses, me.private.losses = me.private.losses, []
        total, count = (yield Agree(sum(losses), How.SUM)), (yield Agree(len(losses), How.SUM))
        if not count:
            raise ConfigError(
                "OSP with ramp=loss needs the loss, and the script has not reported one. Call "
                "pace.report(loss=...) in every iteration, or use ramp=linear."
            )
        if me.agreed.first_loss is None:
            me.agreed.first_loss = total / count
        if me.agreed.first_loss > 0:
            me.agreed.grown = min(1.0, max(0.0, 1.0 - total / count / me.agreed.first_loss))

    # -- the end ------------------------------------------------------------------------------

    def settle(self, me: Me) -> Steps:
        """Wait for what is under way, so that nothing is left."""
        yield from self.install(me)
        me.private.base[:] = me.parameters
        yield from average_buffers(me)

    def model(self, me: Me) -> Vector:
        base: Vector = me.private.base
        return base if me.private.split else me.parameters


def _parts(me: Me, chosen: Iterable[int]) -> tuple[Part, Part]:
    """The tensors chosen, and the others."""
    sizes, late = me.tensors.sizes, set(chosen)
    both = sorted(late), [each for each in range(len(sizes)) if each not in late]
    one, other = (Part(tuple(each), sum(sizes[tensor] for tensor in each)) for each in both)
    return one, other
