"""A worker with a store: its gradients live in shared memory, its weights come from there."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

from paceline.errors import ConfigError, RunStopped
from paceline.runtime.checkpoints.optimizer_state import State
from paceline.runtime.checkpoints.worker_state import WorkerState
from paceline.runtime.messages.workers import Push
from paceline.runtime.worker.emulation import Emulation
from paceline.runtime.worker.link import StoreLink
from paceline.runtime.worker.optimizer.trigger import Trigger, Withheld, norm_of
from paceline.runtime.worker.worker import Worker
from paceline.store.disk.checkpoint import model_state


class PacedWorker(Worker):
    """One of several workers with a store."""

    def __init__(self, link: StoreLink) -> None:
        super().__init__(link, Emulation(link.config, link.rank), peer=False)
        self._halted: WorkerState | None = None
        """Where this worker stood when it heard that the run is stopped."""
        self._looks = False
        """Whether to look for NaN here, where gradients are applied one by one: it is one thing less for the
        store. Where they are added up first, the store looks at the sum in the same pass."""
        if link.trigger is not None:
            self._trainer.trigger = Trigger(link.trigger, link.config.trigger_most)
            self._trainer.intake.on_end = link.before_lingering = self._push_withheld

    # -- preparing ----------------------------------------------------------------------------

    def _heed_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The store steps: it asks some worker that sleeps to run this."""
        self._trainer.after_step = self._after_step.optimizers
        self._link.on_after_step = self._run_after_step

    def _run_after_step(self, which: int) -> None:
        """The store's weights are in this worker's memory, and it takes over what comes of them."""
        name = self._trainer.binding.rewrite(lambda: self._after_step.run(which))
        if name is not None:
            raise ConfigError(
                f"the function of pace.after_step() wrote to {name!r}, which is not trained: the store would "
                "not pass that on. Give a teacher to pace.prepare() as a model of its own, and update it in "
                "the loop."
            )

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
        trainer = self._trainer
        trainer.bind(model, optimizer)
        ready = trainer.register(trainer.describe(), loader)
        self._looks = not ready.shared and self._link.config.store_hosts == 1
        trainer.replace_steps(self._step, self._zero_grad)
        trainer.fetch_state()
        return self._training_begins(ready, model)

    # -- a step -------------------------------------------------------------------------------

    def _iterate(self, compute_s: float, missing: tuple[int, ...]) -> None:
        """The gradient is complete: push it, and sleep until released; or keep it for the next one."""
        trigger = self._trainer.trigger
        if trigger is None:
            self._exchange(self._described(compute_s, missing))
        else:
            self._maybe_push(trigger, compute_s, missing)

    def _described(self, compute_s: float, missing: tuple[int, ...]) -> Push:
        """What is told of the gradient in the segment."""
        trainer = self._trainer
        settings, finite = trainer.changed(), self._looks and trainer.binding.finite()
        return trainer.push(compute_s, missing, self._reported(), settings, finite)

    def _exchange(self, push: Push) -> None:
        """Announce what lies in the segment, and sleep until released."""
        trainer = self._trainer
        try:
            release = self._link.push(push)
        except RunStopped:
            self._halted = trainer.standing()
            raise
        trainer.schedulers.position, trainer.tells = release.position, release.tell
        trainer.overflowed = release.skipped
        self._heed_ahead()

    def _heed_ahead(self) -> None:
        """A look-ahead is where steps will have brought the weights: what follows a step goes for it too."""
        if self._trainer.ahead:
            for which in self._after_step.optimizers:
                self._run_after_step(which)

    # -- pushes that are triggered ------------------------------------------------------------

    def _maybe_push(self, trigger: Trigger, compute_s: float, missing: tuple[int, ...]) -> None:
        intake, gradients, withheld = self._trainer.intake, self._trainer.binding.flats, trigger.withheld
        norm = norm_of(gradients)
        trigger.saw(norm)
        if withheld.steps and not math.isfinite(norm):  # it must not spoil what was kept
            self._push_sum(withheld, wants=False, forced=True)
        if not withheld.steps and trigger.fires(norm):  # as if there were no trigger
            self._exchange(self._described(compute_s, missing))
            return
        withheld.add(gradients, missing)
        withheld.count(intake.samples, intake.used, compute_s)
        fires = trigger.fires(norm_of(withheld.memory))
        if fires or trigger.full:
            self._push_sum(withheld, wants=intake.wants, forced=not fires)

    def _push_withheld(self) -> None:
        """There is no next one for now: push what was kept."""
        trigger = self._trainer.trigger
        if trigger is not None and trigger.withheld.steps:
            self._push_sum(trigger.withheld, wants=False, forced=True)
            self._pull()

    def _push_sum(self, withheld: Withheld, *, wants: bool, forced: bool) -> None:
        """It takes the place of the gradient in the segment, which is the script's own again afterwards."""
        binding = self._trainer.binding
        own = [each.clone() for each in binding.flats]
        _write(binding.flats, withheld.memory)
        binding.show()
        push = structs.replace(
            self._described(withheld.compute_s, tuple(sorted(withheld.missing))),
            samples=withheld.samples,
            used=tuple(withheld.used),
            want=wants,
            weigh=withheld.each,
            withheld=withheld.steps - 1,
            forced=forced,
        )
        withheld.clear()
        self._exchange(push)
        _write(binding.flats, own)
        binding.show()

    def _pull(self) -> None:
        """Weights have arrived, and not by a step; where all have the same, they are what they were."""
        self._trainer.binding.pull()
        if not self._trainer.complete:
            self._trainer.binding.outdate()

    # -- evaluating and saving ----------------------------------------------------------------

    def _away(self) -> None:
        if self._model is not None:
            self._push_withheld()
            self._trainer.adopt()
            self._link.away()
            self._pull()

    def _back(self, values: dict[str, float], seconds: float) -> None:
        if self._model is not None:
            self._trainer.evaluated()
            self._trainer.schedulers.position = self._link.back(values, seconds).position
            self._heed_ahead()
            self._pull()

    def _state_now(self) -> tuple[dict[str, Tensor], State]:
        """Weights and what the optimizer remembers, both of one moment; buffers are this worker's own."""
        self._trainer.check_reaches_state()
        self._push_withheld()
        (tensors, values), layout = self._link.recall(weights=True), self._trainer.binding.layout
        views = [tensors.pop(f"model.{slot.name}") for slot in layout.parameters]
        return model_state(layout, views, self._link.segments[0].bytes), (tensors, values)

    def _whose(self) -> str:
        ahead = self._trainer.ahead
        return "a look-ahead of the store's weights" if ahead else "the weights that it read last"

    # -- the run ------------------------------------------------------------------------------

    def _end_work(self, why: str) -> None:
        self._push_withheld()
        super()._end_work(why)

    def _leave(self) -> None:
        with contextlib.suppress(RunStopped):  # where it stands is told all the same
            self._push_withheld()
        self._trainer.leave(self._reported(), self._waits, self._halted, self._whose())

    def end(self, error: BaseException | None, text: str) -> None:
        if error is not None and self._trainer.trigger is not None:
            self._trainer.trigger.withheld.clear()  # its samples are dispensed again
        super().end(error, text)


def _write(gradients: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for each, value in zip(gradients, values, strict=True):
        each.copy_(value)
