"""Carries verdicts out on the store: one gradient at once, or all that are held together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from paceline.config import RunConfig
from paceline.protocols import Decision, Fate, Flush
from paceline.protocols.rules import increments
from paceline.runtime.run.alike import different_optimizers
from paceline.runtime.run.held_gradients import HeldGradient
from paceline.runtime.run.member import Member, bad_gradient, smallest
from paceline.runtime.run.owner_view import AfterStepCalls
from paceline.runtime.run.run import Run
from paceline.store.corrections.correction import GradientPart, Stride
from paceline.store.increments import AddingStore
from paceline.store.optimizers import GroupSettings
from paceline.store.parameters import Gradients, clip_factor, shares

_APPLY = Fate.APPLY  # an enum's member costs a tenth of a microsecond to look up


class VerdictApplier:
    """Moves the weights of one run as its verdicts say. Who is released is not its business."""

    def __init__(
        self, config: RunConfig, run: Run, members: Mapping[int, Member], after_steps: AfterStepCalls
    ) -> None:
        self._config = config
        self.run = run
        self._members = members
        self._after_steps = after_steps

    def carry_out(self, decision: Decision) -> float:
        """The gradient, then the flush, then factors for later steps. Returns how much the step counted.

        The memory of those who are released has the result.
        """
        run, fate, flush = self.run, decision.fate, decision.flush
        if run.store.applies == "increments":
            increments.check_decision(run.ledger.named[0], decision)
        scale, stale = 1.0, self._stale(decision)
        if run.store.looks_ahead:
            run.store.awake(run.computing)
        if decision.pushed is not None:
            pushed = self._pushed(decision, self._members[decision.pushed])
            if fate is _APPLY:
                scale = self._alone(decision, pushed, [] if flush else stale)
                run.held.done(pushed)
            elif fate is Fate.HOLD:
                run.held.hold(pushed)
        if flush is not None:
            scale = self._flush(decision, flush, stale)
        elif fate is not _APPLY:
            for copy in stale:
                run.store.hand_out(copy)
        if decision.adjust:
            run.store.adjusted |= decision.adjust
        run.ledger.carried_out(decision)
        return scale

    def _stale(self, decision: Decision) -> list[Tensor]:
        """Copies of the weights that their workers are about to read."""
        released = map(self._members.__getitem__, sorted(decision.release))
        return [x.weights.bytes for x in released if x.weights is not None and not x.gone]

    def _alone(self, decision: Decision, pushed: HeldGradient, copies: list[Tensor]) -> float:
        if isinstance(self.run.store, AddingStore):
            return self._add(self.run.store, pushed, copies)
        batches, active = self.run.ledger.batches([pushed.samples]), self._active
        scale = decision.lr_scale * self._config.step_share(batches, active)
        scale *= self._config.damped(decision.staleness, active)
        clip = self._clip(pushed)
        norm = self._norm(pushed, clip)
        if self.run.store.looks_ahead:
            stride = Stride(scale, self._config.step_share(1.0, active), active)
            self._apply_each([pushed], [1.0], stride, norm, clip, copies)
        else:
            self._apply(pushed.gradients, [pushed], scale, norm, clip, copies)
        return scale

    def _add(self, store: AddingStore, pushed: HeldGradient, copies: list[Tensor]) -> float:
        """What a worker's own step has changed, in full."""
        member = self._members[pushed.rank]
        assert member.weights is not None, "outside of lockstep every worker has a copy"
        if member.finite or math.isfinite(store.norm(pushed.gradients)):
            self._step([pushed], partial(store.add, pushed.gradients, member.weights.bytes), copies)
        else:
            self._skip([pushed], copies)
        return 1.0

    def _pushed(self, decision: Decision, member: Member) -> HeldGradient:
        """What has come; corrected, while its worker's memory still has the weights it was computed at."""
        what = member.rank, member.pushed, decision.weight, member.samples, member.which
        pushed = HeldGradient(*what, decision.read)
        if self.run.store.mends and decision.fate is not Fate.DROP and member.weights is not None:
            pushed = pushed if member.spent else self.run.held.apart(pushed)
            self.run.store.mend(pushed.gradients, member.weights.bytes)
        return pushed

    def _norm(self, pushed: HeldGradient, clip: float | None) -> float | None:
        """None if the gradient is known to be finite, and nobody wants more."""
        store = self.run.store
        if store.mends:  # it is another one than its worker looked at, in all portions
            return store.reduce([(pushed.gradients, 1.0)])[1]
        known = clip is None and self._members[pushed.rank].finite
        return None if known else store.norm(pushed.gradients)

    def _flush(self, decision: Decision, flush: Flush, copies: list[Tensor]) -> float:
        """One step with all that is held."""
        run = self.run
        held, scale = run.held.take(), 1.0
        alike = self._alike(held)
        for number, parts in enumerate(alike, 1):
            scale = self._flush_alike(decision, flush, parts, copies if number == len(alike) else [])
        run.held.done(*held)
        return scale

    def _flush_alike(
        self, decision: Decision, flush: Flush, parts: list[HeldGradient], copies: list[Tensor]
    ) -> float:
        """One step of one optimizer. Who had no samples, while others had, is not counted."""
        run = self.run
        samples = [part.samples for part in parts]
        batches = run.ledger.batches([count for count in samples if count] or samples)
        share = self._config.step_share(batches, self._active, flush.value)
        scale, mean = decision.lr_scale * share, flush is not Flush.SUM
        factors, clip = self._contributions(decision, parts, mean), self._clip(parts[0])
        if run.store.looks_ahead:
            _, norm = run.store.reduce(factors, run.held.scratch)
            stride = Stride(scale, share / len(parts) if mean else share, self._active)
            self._apply_each(parts, [factor for _, factor in factors], stride, norm, clip, copies)
        else:
            spent = self._members[parts[0].rank].spent  # else its script adds to what lies there
            total, norm = run.store.reduce(factors, None if spent else run.held.scratch)
            self._apply(total, parts, scale, norm, clip, copies)
        return scale

    def _contributions(
        self, decision: Decision, parts: list[HeldGradient], mean: bool
    ) -> list[tuple[Gradients, float]]:
        """Each gradient with its factor in a flush. To damp one does not make the others count more."""
        weights, samples = [part.weight for part in parts], [part.samples for part in parts]
        if not mean:  # as if each were applied alone
            weights = [each * self.run.ledger.batches([n]) for each, n in zip(weights, samples, strict=True)]
        active, before = self._active, decision.version - 1
        damped = [self._config.damped(before - part.read, active) for part in parts]
        named = zip(parts, shares(weights, samples, mean), damped, strict=True)
        return [(part.gradients, factor * left) for part, factor, left in named]

    def _alike(self, held: list[HeldGradient]) -> list[list[HeldGradient]]:
        """By optimizer: gradients for different ones have no mean. In lockstep all step the same one."""
        numbers = sorted({part.which for part in held})
        if len(numbers) > 1 and self.run.ledger.pacer.in_lockstep:
            raise different_optimizers({part.rank: part.which for part in held})
        return [[part for part in held if part.which == number] for number in numbers]

    def _apply(
        self,
        gradients: Gradients,
        sources: list[HeldGradient],
        scale: float,
        norm: float | None,
        clip: float | None,
        copies: list[Tensor],
    ) -> None:
        """One step. `norm`: None if the gradients are known to be finite."""
        store = self.run.store
        if norm is not None and not math.isfinite(norm):
            self._skip(sources, copies)
        else:
            given = gradients, self._settings(sources), scale, norm, clip
            self._step(sources, partial(store.apply, *given), copies)

    def _clip(self, first: HeldGradient) -> float | None:
        """The largest norm the step may have: what the command allows, and the first worker's script."""
        return smallest(self._config.clip_norm, self._members[first.rank].clip)

    def _skip(self, sources: list[HeldGradient], copies: list[Tensor]) -> None:
        """No step: where a GradScaler looks after them its workers are told, else the run ends."""
        members, store = [self._members[source.rank] for source in sources], self.run.store
        if not any(member.scaled for member in members):
            raise bad_gradient(sources, store.layout)
        for member in members:
            member.overflowed = True
        for copy in copies:
            store.hand_out(copy)

    def _apply_each(
        self,
        sources: list[HeldGradient],
        factors: list[float],
        stride: Stride,
        norm: float | None,
        clip: float | None,
        copies: list[Tensor],
    ) -> None:
        """One step, with every gradient through its own worker's momentum."""
        store = self.run.store
        if norm is not None and not math.isfinite(norm):
            return self._skip(sources, copies)
        stride = stride._replace(factor=clip_factor(norm or 0.0, clip))
        named = zip(sources, factors, strict=True)
        parts = [GradientPart(x.rank, x.gradients, factor, self._members[x.rank].gone) for x, factor in named]
        step = partial(store.apply_each, parts, self._settings(sources), stride)
        return self._step(sources, step, copies)

    def _step(
        self, sources: list[HeldGradient], step: Callable[[list[Tensor]], None], copies: list[Tensor]
    ) -> None:
        """Take it, and let the `copies` have what comes of it, by the script's own function too."""
        which, run = sources[0].which, self.run
        if which not in run.after_step:
            step(copies)
            return
        step([])
        self._after_steps.run(which, [source.rank for source in sources])
        for copy in copies:
            run.store.hand_out(copy)

    def _settings(self, sources: list[HeldGradient]) -> list[GroupSettings]:
        """The first worker's optimizer, its rate within the command's cap."""
        settings, cap = self._members[sources[0].rank].settings, self._config.lr_cap
        if cap is None:
            return settings
        return [group | {"lr": min(group["lr"], cap)} for group in settings]

    @property
    def _active(self) -> int:
        return len(self.run.ledger.pacer.clocks.active)
