"""A worker's training among others, as far as it is the same with a store and without one.

It ties the model to the run's memory, counts data, has schedulers follow the run, and makes every step of
the script's optimizers an exchange. What an exchange is, the workers that have this know.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import ConfigError
from paceline.runtime.checkpoints.optimizer_state import in_order, state_of
from paceline.runtime.checkpoints.random_state import RandomState, seed_apart
from paceline.runtime.checkpoints.step_settings import StepSettings
from paceline.runtime.checkpoints.worker_state import WorkerState
from paceline.runtime.messages.workers import Push, Ready
from paceline.runtime.worker.data.intake import Intake
from paceline.runtime.worker.data.reach import Reach
from paceline.runtime.worker.emulation import Emulation, VirtualDevice
from paceline.runtime.worker.link import StoreLink
from paceline.runtime.worker.model.binding import Binding
from paceline.runtime.worker.model.wrappers import refuse_sharded
from paceline.runtime.worker.optimizer.clipping import Watch
from paceline.runtime.worker.optimizer.plateau import Unshared
from paceline.runtime.worker.optimizer.prepared import PreparedSchedulers
from paceline.runtime.worker.optimizer.replacing import replace_step
from paceline.runtime.worker.optimizer.scaling import check_scaler, taken_from, tell_scaler, welcome_scalers
from paceline.runtime.worker.optimizer.schedules import misfit
from paceline.runtime.worker.optimizer.store_state import Elsewhere
from paceline.runtime.worker.optimizer.trigger import Trigger
from paceline.runtime.worker.writing import Writing
from paceline.store.disk.tensor_files import check_can_be_saved
from paceline.store.optimizers import GroupSettings, OptimizerSpec, describe_optimizer, group_settings
from paceline.store.together import parts_of


class Trainer:
    """One worker's."""

    model: nn.Module
    binding: Binding
    optimizer: torch.optim.Optimizer

    def __init__(self, link: StoreLink, device: Emulation | VirtualDevice, peer: bool) -> None:
        self.link, self._peer = link, peer
        self._steps_here = peer or link.config.apply == "increments"
        """Whether the script's optimizer steps here, unless one steps for all."""
        self.intake = Intake(link, device)
        self.schedulers = PreparedSchedulers(self.intake, link.say)
        self.figure = Unshared(link.rank, link.say)
        """What was evaluated here."""
        self.step_settings = StepSettings(link.say)
        """What the optimizer remembers in its groups."""
        self.which = 0
        """Which of several optimizers steps."""
        self.shared = False
        """Whether all read the same weights."""
        self.ahead = False
        """Whether this worker computes on a look-ahead, and not on the weights of the store."""
        self.clip_to: float | None = None
        """The largest norm the next step may have, as the script asked."""
        self.scaled = False
        """Whether a GradScaler looks after this worker's steps."""
        self.overflowed = False
        """Whether the last of them was skipped, here or for all."""
        self.tells = False
        """Whether the next push is to tell where this worker stands."""
        self._steps = 0
        self.begun = False
        """Whether there is a model."""
        self.trigger: Trigger | None = None
        self.after_step: tuple[int, ...] = ()
        """The optimizers after whose steps the script has something run."""
        """What says whether a gradient is pushed; None: every one is."""
        self.planned: int | None = None
        """How many epochs the script means to run, as far as it has told."""
        self._elsewhere: list[Elsewhere] = []
        """The script's optimizers, where steps are taken elsewhere."""
        self._sent: list[GroupSettings] = []
        self._cleared: set[int] = set()
        """Optimizers whose gradients the script has cleared since their last step."""
        self._spent: set[int] = set()
        """Those whose had been cleared before that step, so that a mean may have taken their place."""
        self.complete = False
        """Whether its model is the one that the run evaluates and saves."""
        self._told_incomplete = False
        self._changed_in: int | None = -1
        """The epoch in which the script last changed a setting itself; None: it was told."""

    @property
    def fed(self) -> bool:
        """Whether its weights come from elsewhere after every step."""
        return not self._peer or self.shared

    @property
    def _lead(self) -> bool:
        return self.link.lead

    # -- preparing ----------------------------------------------------------------------------

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """These are trained."""
        check_can_be_saved(model)
        self.model, self.binding, self.optimizer = model, Binding(model, optimizer), optimizer
        self._writing = Writing(self.binding, self.link.rank, self.link.say)
        self._sizes = self._group_sizes()
        self.begun = True

    def describe(self) -> OptimizerSpec:
        """The optimizer as the run is to have it."""
        spec = describe_optimizer(self.optimizer, self.binding.index)
        self._sent = [group.settings for group in spec.groups]
        return spec

    def register(self, spec: OptimizerSpec, loader: Any) -> Ready:
        """Show the model, wait for everybody, and take the memory."""
        if self.optimizer.state and spec.groups:
            self._hand_over_state()
        source = self.intake.offer(loader, self.optimizer)
        ready = self.link.register(self.binding, spec, source, self._peer, self.after_step)
        self.schedulers.position, self.intake.resumed = ready.position, ready.epoch > 0
        self.shared, self.ahead, self.complete = ready.shared, ready.ahead, ready.agrees
        self._watch = Watch(self.binding.trained)
        self._reach = Reach(self.binding, self._watch, self.intake.several)
        self.intake.reached = self._reach.reached
        if self.shared or not self._steps_here:
            self.optimizer.state.clear()
        self.tells = ready.tell
        if ready.state is not None:
            self.go_on(ready.state)
        return ready

    def _hand_over_state(self) -> None:
        """It remembers steps that were taken before, or loaded: the lead's memories are those of the run."""
        if not self.link.reaches_state:
            raise ConfigError(
                "the optimizer has already taken steps, and a run on several hosts cannot take over its "
                "state. Prepare a new optimizer, or use --resume."
            )
        if self._lead:
            self.link.restore(state_of(self.optimizer, in_order(self.optimizer, self.binding.index)))

    def replace_steps(self, step: Callable[..., Any], zero_grad: Callable[..., None]) -> None:
        """Have every optimizer's step be an exchange of its own. Both are told which optimizer's it is."""
        elsewhere = self.shared or not self._steps_here
        for which, part in enumerate(parts_of(self.optimizer)):
            replace_step(part, partial(step, which), hooked=elsewhere)
            welcome_scalers(part)
            part.zero_grad = partial(zero_grad, which)  # type: ignore[method-assign]

    def fetch_state(self) -> None:
        """Steps are taken elsewhere, so that is where their memories are."""
        first = 0
        for part in parts_of(self.optimizer):
            self._elsewhere.append(Elsewhere(part, self.binding.index, self.link, self.link.say, first))
            first += len(in_order(part, self.binding.index))

    def begin(self, ready: Ready) -> Any:
        """Training begins: the loader that the script is to have."""
        if self.link.config.workers > 1 and not self.shared:
            self.figure.watch(parts_of(self.optimizer))
        seed_apart(self.link.config.seed, self.link.rank)
        return self.intake.begin(ready)

    # -- schedulers ---------------------------------------------------------------------------

    def watch_length(self, scheduler: LRScheduler) -> None:
        """Say so if a schedule that was made before prepare turns out to have another length than the run."""
        if self._lead and self.link.config.schedule == "samples":
            self.schedulers.when_following(scheduler, partial(self._mention_misfit, scheduler))

    def _mention_misfit(self, scheduler: LRScheduler) -> None:
        before, now = self.intake.lengths
        if before and now:
            said = misfit(scheduler, before, now, self.link.config.workers, self.planned)
            if said is not None:
                self.link.say(said)

    def go_on(self, state: WorkerState) -> None:
        """The run goes on, and this worker where it stood."""
        self.intake.go_on(state)
        self.schedulers.go_on(state.schedules, state.marks)
        if self.trigger is not None:
            self.trigger.go_on(state.norms)

    def standing(self) -> WorkerState:
        """Where this worker stands."""
        norms = (0, 0.0) if self.trigger is None else self.trigger.standing
        return WorkerState(RandomState.now(), self.intake.epoch, *self.schedulers.standing(), norms)

    # -- a step -------------------------------------------------------------------------------

    def step(
        self,
        which: int,
        closure: Callable[[], Any] | None,
        iterate: Callable[[float, tuple[int, ...]], None],
    ) -> Any:
        """One of several optimizers is to step: `iterate` carries it out, given the time that computing took
        and the parameters without a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._group_sizes() != self._sizes:
            raise ConfigError("the optimizer got new parameters after pace.prepare(). Add them before.")
        self._refuse_others()
        self.which = which
        if self._elsewhere:
            self._elsewhere[which].steps()
        self.binding.choose(which)
        self.schedulers.begin(another=self.intake.again(which))
        self.intake.steps()
        compute_s = self.intake.computed()
        self.adopt()
        self._mention_left_over()
        self._exchange(lambda missing: iterate(compute_s, missing))
        self.binding.fresh()
        self._reach.stepped()
        self.intake.stepped(which)
        self.clip_to = None
        return loss

    def _refuse_others(self) -> None:
        """A model may get other parameters after prepare: look in the first steps, then more rarely."""
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:
            refuse_sharded(self.model)
            self._refuse_strangers()

    def _refuse_strangers(self) -> None:
        name = self.binding.stranger(self.model)
        if name is not None:
            raise ConfigError(
                f"parameter {name!r} is another object than when the model was prepared, or is new: no "
                "optimizer steps it, and the run neither exchanges nor saves it. Build the model before "
                "pace.prepare(); write to a parameter in place (p.copy_(...)) in pace.after_step(fn)."
            )

    def _exchange(self, iterate: Callable[[tuple[int, ...]], None]) -> None:
        """Unscale it if need be, and carry the iteration out; a scaler hears what it could not see."""
        optimizer = parts_of(self.optimizer)[self.which]
        scaled, self.overflowed = taken_from(optimizer), False
        if scaled is not None:
            check_scaler(self.trigger is not None, self.link.config.store_hosts)
        self.scaled |= scaled is not None
        if self.clip_to is None and self._watch.changed(scaled is not None):
            self._mention_clipping()
        missing = self.binding.collect(scaled, self._watch.backwards)
        self._watch.backwards.clear()
        iterate(missing)
        elsewhere = scaled is not None and self.overflowed and not scaled.found_inf
        if elsewhere and not tell_scaler(optimizer):
            self.link.say(
                f"rank {self.link.rank}: a step was skipped for an overflow elsewhere, but the scaler that "
                "called could not be told; its scale may differ from the others'. Use torch.amp.GradScaler"
            )

    def clip(self, max_norm: float) -> None:
        """The next step is to be clipped."""
        if self.link.config.store_hosts > 1:
            raise ConfigError("pace.clip_grad_norm_() needs a store on one host. Use --clip-norm instead.")
        if self.trigger is not None:
            raise ConfigError(
                "pace.clip_grad_norm_() is about the next step, and with --trigger that may not be pushed. "
                "Use --clip-norm for what is stepped with, or torch's own for each worker's gradients."
            )
        self.clip_to = max_norm

    def _mention_clipping(self) -> None:
        """Say once, for all, what becomes of gradients that the script changes by itself."""
        if self._lead:
            self.link.say(
                "the script changes gradients between backward and step. Every worker changes its own: "
                "clip_grad_norm_ clips each by its own norm, before they are averaged. Write "
                "pace.clip_grad_norm_(max_norm) to clip what is stepped with; a constant factor is fine"
            )

    def adopt(self, leaving: bool = False) -> None:
        """Take over what the script has put in the place of tensors of its model."""
        self.binding.adopt_buffers()
        if self.fed:
            self._writing.look(leaving)
        if self._steps_here and not self.shared:
            self.binding.adopt_weights()

    def evaluated(self) -> None:
        """What the lead has called may have written to weights that come from elsewhere."""
        self._refuse_strangers()
        if self.fed:
            self._writing.look_evaluated()

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def clear(self, which: int, set_to_none: bool) -> None:
        """The script clears an optimizer's gradients: what steps are made with may lie there from now on."""
        self._cleared.add(which)
        self.binding.zero(set_to_none, which)
        self.intake.cleared(which)
        self._reach.cleared()

    def _mention_left_over(self) -> None:
        """Say so if a script adds to gradients that it had cleared so far: they may be its own no more."""
        which, own = self.which, self._steps_here and not self.shared
        if which in self._spent and which not in self._cleared and not own:
            self.link.say(
                f"rank {self.link.rank} has not cleared its gradients since its last step, though it did "
                "before. They may contain the mean of all workers: clear them after every step, or never"
            )
        self._spent = self._spent - {which} | self._cleared & {which}
        self._cleared.discard(which)

    def changed(self) -> list[GroupSettings] | None:
        """The optimizer's settings, if a scheduler has changed them."""
        settings = group_settings(self.optimizer)
        changed, self._sent = settings != self._sent, settings
        if changed and self._lead and self._changed_in is not None and not self.schedulers.any:
            self._mention_changed()
        return settings if changed else None

    def _mention_changed(self) -> None:
        """Say once that settings which change within an epoch count this worker's steps, which are fewer."""
        epoch, (before, now) = self.intake.epoch, self.intake.lengths
        if epoch != self._changed_in or epoch < 0 or before == now:
            self._changed_in = epoch
            return
        self._changed_in = None
        self.link.say(
            "the learning rate (or another setting) changes within an epoch, and no scheduler was prepared: "
            f"it counts this worker's own steps. An epoch has {now} of them here, and {before} alone: build "
            "a schedule from len(loader) after prepare, and give it to pace.prepare(scheduler)"
        )

    def push(
        self,
        compute_s: float,
        missing: tuple[int, ...],
        values: dict[str, float] | None,
        settings: list[GroupSettings] | None,
        finite: bool = False,
    ) -> Push:
        """What is told of an iteration."""
        intake = self.intake
        return Push(
            compute_s,
            intake.samples,
            tuple(intake.used),
            settings,
            missing,
            values,
            want=intake.wants,
            finite=finite,
            scaled=self.scaled,
            clip=self.clip_to,
            which=self.which,
            again=intake.again(self.which),
            weigh=intake.weigh(self.which),
            spent=self.which in self._spent,
            state=self.standing() if self.tells else None,
        )

    # -- besides ------------------------------------------------------------------------------

    def check_reaches_state(self) -> None:
        """Refuse to save what is not on this host."""
        if not self.link.reaches_state:
            raise ConfigError(
                "pace.save() needs the whole run on one host. Use --checkpoint-every, and --resume to go on."
            )

    def swap(self, data: bytes, more: bool) -> dict[int, bytes]:
        """Give bytes to all, and get theirs."""
        if not self.begun:
            raise ConfigError(
                "pace.gather() was called before pace.prepare(): the run has not begun. Prepare first."
            )
        self.figure.shared()
        return self.link.exchange(data, more)

    def end_work(self, why: str) -> None:
        """Nobody is to get further work."""
        if not self.begun:
            raise ConfigError(
                "pace.stop() was called before pace.prepare(): there is no training yet. Prepare first."
            )
        self.link.end_work(why)

    def leave(
        self, values: dict[str, float] | None, waits: bool, halted: WorkerState | None, whose: str
    ) -> None:
        """Take no further part. If it `waits`, for the model that the run saves; `whose` it has till then."""
        warning = self.intake.device.warning()
        if warning:
            self.link.say(f"rank {self.link.rank}: {warning}")
        self.intake.ends()
        if self.begun and self.binding.attached:
            self.adopt(leaving=True)
            stranger = self.binding.stranger(self.model)
            if stranger is not None:
                self.link.say(
                    f"rank {self.link.rank} has a parameter {stranger!r} that the model did not have when it "
                    "was prepared: the run saves the model without it"
                )
        handed = waits and self.link.config.listen is None
        if waits and not handed and self.shared:
            self.binding.part()
        if waits and not handed and not self.complete:
            self.link.say(
                f"rank {self.link.rank} keeps {whose} after pace.leave(): a run on several hosts does not "
                "send the saved model to workers. Read weights.safetensors"
            )
        self.link.leave(values, handed, halted, self.intake.told_passes())
        if handed:
            self.binding.settle(sealed=self.shared)
            self.complete = True

    def mention_incomplete(self, whose: str) -> None:
        """Say once that what a script saves now is not what the run saves."""
        if not (self.complete or self._told_incomplete):
            self._told_incomplete = True
            self.link.say(
                f"rank {self.link.rank} takes model.state_dict() of {whose}, which is not what the run "
                "evaluates and saves. Call pace.leave() first, after the last step, or pace.save(path)"
            )
