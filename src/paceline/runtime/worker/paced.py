"""A worker with a store: its gradients live in shared memory, its weights come from there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import ConfigError, RunError, RunStopped
from paceline.runtime.checkpoints.optimizer_state import State, in_order, state_of
from paceline.runtime.checkpoints.random_state import RandomState, seed_apart
from paceline.runtime.checkpoints.worker_state import WorkerState, standing, steps_to_take
from paceline.runtime.messages.workers import Push
from paceline.runtime.worker.binding import Binding
from paceline.runtime.worker.emulation import Emulation, VirtualDevice
from paceline.runtime.worker.link import StoreLink
from paceline.runtime.worker.loader import Dispensed, PacedLoader, StridedLoader, source_of
from paceline.runtime.worker.optimizer.clipping import Watch
from paceline.runtime.worker.optimizer.scaling import taken_from, tell_scaler, welcome_scalers
from paceline.runtime.worker.optimizer.schedules import misfit
from paceline.runtime.worker.optimizer.store_state import Elsewhere
from paceline.runtime.worker.pace import Pace, catch_up, follow, replace_step
from paceline.runtime.worker.partition import Partition
from paceline.runtime.worker.sample_order import SampleOrders
from paceline.runtime.worker.saving_notice import notice_saving
from paceline.runtime.worker.second_pass import SecondPass
from paceline.store.disk.checkpoint import model_state
from paceline.store.optimizers import GroupSettings, OptimizerSpec, describe_optimizer, group_settings
from paceline.store.together import parts_of
from paceline.store.work.budget import Batch
from paceline.store.work.chunks import CHUNKED, arrange


class PacedWorker(Pace):
    """One of several workers."""

    peer: ClassVar[bool] = False

    def __init__(self, link: StoreLink) -> None:
        super().__init__(link.rank, link.config.workers)
        self._link = link
        simulated = self.peer and link.config.cluster is not None
        self._emulation = VirtualDevice(link.computed) if simulated else Emulation(link.config, link.rank)
        self._repeats = SecondPass(self._emulation.begin)
        self._sent: list[GroupSettings] = []
        self._used: list[Batch] = []
        self._samples = 0
        self._fed = False
        self._batch: int | None = None
        self._usual = 1
        """Samples of a full batch, as far as they are known beforehand."""
        self._which = 0
        """Which of several optimizers steps."""
        self._since = [0]
        """Samples since the last step of each."""
        self._last = 0
        self._feeds = False
        """Whether there is a loader that tells of samples."""
        self._position = 0
        self._resumed = False
        self._shared = False
        """Whether all read the same weights."""
        self._written = False
        """Whether it was said that the script writes to parameters."""
        self._clip_to: float | None = None
        """The largest norm the next step may have, as the script asked."""
        self._ahead = False
        """Whether this worker computes on a look-ahead, and not on the weights of the store."""
        self._scaled = False
        """Whether a GradScaler looks after this worker's steps."""
        self._overflowed = False
        """Whether the last of them was skipped, here or for all."""
        self._complete = False
        """Whether its model is the one that the run evaluates and saves."""
        self._told_incomplete = False
        self._random: RandomState | None = None
        """Where random numbers stood when the run was stopped that goes on; None once they stand there."""
        self._epoch = -1
        self._schedules: list[int] = []
        """How often each prepared scheduler was stepped."""
        self._stepped: list[int] | None = None
        """The same by the checkpoint that the run goes on from, of those not prepared yet."""
        self._said: set[str] = set()
        """What was warned of: once is enough."""
        self._counted = False
        """Whether a loader tells how many samples there are."""
        self._lengths = (0, 0)
        """Of the loader before and after prepare, as far as they are known."""
        self._in_pass = 0
        self._began = 0
        """Where schedulers were to stand when the iteration under way began."""
        self._tells = False
        self._halted: WorkerState | None = None
        """Where this worker stood when it heard that the run is stopped."""
        self._looks = False
        """Whether to look for NaN here, where gradients are applied one by one: it is one thing less for the
        store. Where they are added up first, the store looks at the sum in the same pass."""

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                "the model is a DistributedDataParallel, which averages gradients itself. Prepare the model "
                "inside of it (model.module), and leave out init_process_group."
            )
        self._binding = Binding(model, optimizer)
        spec = self._describe(optimizer)
        if optimizer.state and spec.groups:
            self._hand_over_state(optimizer)
        config = self._link.config
        self._since, self._feeds = [0] * len(parts_of(optimizer)), loader is not None
        self._check_several()
        source, sampler, whole = source_of(loader) if loader is not None else (None, None, False)
        source, injection = arrange(source, config)
        self._batch = source.batch if source is not None and config.balance else None
        self._usual = 1 if source is None else source.batch
        ready = self._link.register(self._binding, spec, source, self.peer)
        self._position, self._resumed, self._shared = ready.position, ready.epoch > 0, ready.shared
        self._looks = not (self.peer or ready.shared) and config.store_hosts == 1
        self._ahead, self._complete = ready.ahead, ready.agrees
        self._watch = Watch(self._binding.trained)
        if self._shared or not self.peer:
            optimizer.state.clear()
        self._tells = ready.tell
        if ready.state is not None:
            self._find(ready.state)
        self._take_over(optimizer)
        notice_saving([model, *self._models], self._mention_incomplete)
        seed_apart(config.seed, self.rank)
        self._counted = loader is not None
        self._lengths = 0 if source is None else source.batches, ready.rounds or 0
        if loader is None:
            self._mention_no_loader()
            self._passed()
            self._emulation.begin()
            return None
        if source is None:
            rank, size = (0, 1) if isinstance(loader.dataset, Partition) else (self.rank, self.size)
            return StridedLoader(loader, rank, size, self._arrived, self._repeats, lambda: self.stopped)
        orders = SampleOrders(sampler, source.units, config.seed, config.shards in CHUNKED, loader)
        dispensed = Dispensed(
            self._link, orders, source, whole, ready.epoch, injection, ready.rounds, self._load
        )
        return PacedLoader(loader, dispensed, self._arrived, self._passed, self._repeats)

    def _check_several(self) -> None:
        """Refuse what would not be right with several optimizers."""
        config = self._link.config
        for flag, on in {
            "--balance": config.balance,
            f"--compress {config.compress}": config.compress != "none",
            f"--store-hosts {config.store_hosts}": config.store_hosts > 1,
        }.items():
            if on and len(self._since) > 1:
                raise ConfigError(f"{flag} does not go with several optimizers, so far. Leave it out.")

    def _hand_over_state(self, optimizer: torch.optim.Optimizer) -> None:
        """It remembers steps that were taken before, or loaded: the lead's memories are those of the run."""
        if not self._link.reaches_state:
            raise ConfigError(
                "the optimizer has taken steps already, and in a run on several hosts nobody could hand that "
                "over. Prepare it fresh, or use --resume."
            )
        if self.lead:
            self._link.restore(state_of(optimizer, in_order(optimizer, self._binding.index)))

    def _mention_no_loader(self) -> None:
        if self.lead:
            self._warn(
                "prepare was given no loader: every worker draws its own batches, by random numbers of its "
                "own from here on, and nobody shares data out among them. The run counts samples if the "
                "script says pace.report(samples=...) before each step; to share data, prepare a DataLoader"
            )

    def _describe(self, optimizer: torch.optim.Optimizer) -> OptimizerSpec:
        """The optimizer as the store is to have it."""
        spec = describe_optimizer(optimizer, self._binding.index)
        self._sent = [group.settings for group in spec.groups]
        return spec

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on steps are taken in the store."""
        self._replace(optimizer)
        self._fetch_state(optimizer)

    def _replace(self, optimizer: torch.optim.Optimizer) -> None:
        """Have every optimizer's step be an exchange of its own."""
        for which, part in enumerate(parts_of(optimizer)):
            replace_step(part, partial(self._step, which))
            welcome_scalers(part)
            part.zero_grad = partial(self._zero_grad, which)  # type: ignore[method-assign]

    def _fetch_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps are taken elsewhere, so that is where their memories are."""
        first = 0
        for part in parts_of(optimizer):
            Elsewhere(part, self._binding.index, self._link, self._warn, first)
            first += len(in_order(part, self._binding.index))

    def _prepare_scheduler(self, scheduler: LRScheduler) -> None:
        """Let the scheduler stand where the run's samples (or updates) say, whoever processed them."""
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau is stepped with a metric; leave it out of prepare.")
        done = steps_to_take(self._stepped.pop(0) if self._stepped else None, self._position)
        catch_up(scheduler, done)
        schedules, number = self._schedules, len(self._schedules)
        schedules.append(done)

        def missed() -> int:
            done = schedules[number]
            schedules[number] = max(self._position, done)
            return schedules[number] - done

        follow(scheduler, missed)

    def _mention_misfit(self, scheduler: LRScheduler) -> None:
        before, now = self._lengths
        if self.lead and before and now and self._link.config.schedule == "samples":
            said = misfit(scheduler, before, now, self.size)
            if said is not None:
                self._warn(said)

    def _swap(self, data: bytes, more: bool) -> dict[int, bytes]:
        if self._model is None:
            raise ConfigError("pace.gather() before pace.prepare(): the run has not begun. Prepare first.")
        return self._link.exchange(data, more)

    def _find(self, state: WorkerState) -> None:
        """The run goes on, and this worker where it stood."""
        self._random, self._epoch, self._stepped = state.random, state.epoch, list(state.schedules)

    def _stand(self) -> WorkerState:
        schedules = tuple(standing(steps, self._began) for steps in self._schedules)
        return WorkerState(RandomState.now(), self._epoch, schedules)

    # A loader draws a random number at the beginning of each pass. Resumed, a script begins passes again that
    # are behind it: what these draw is taken back, but not what a pass draws that is really new.

    def _load(self, batch: Batch) -> None:
        """A batch is about to be loaded."""
        if self._random is not None and batch.epoch == self._epoch:
            self._random.restore()
        self._random = None

    def _arrived(self, samples: int, batch: Batch | None = None) -> None:
        """A batch reached the script."""
        self._fed = True
        self._in_pass += 1
        self._samples += samples
        self._last = samples
        self._since = [each + samples for each in self._since]
        if batch is not None:
            self._epoch = batch.epoch
            self._used.append(batch)
        self._resumed = False
        self._emulation.begin()

    def _passed(self) -> None:
        """The loader has come to an end."""
        length, batches, self._in_pass = self._lengths[1], self._in_pass, 0
        if self._used and batches != length:
            self._warn(
                f"rank {self.rank} ended a pass with gradients of {len(self._used)} batches that it has not "
                f"stepped with. It had {batches} batches, and len(loader) is {length}: under this protocol "
                "that is an average, so `i + 1 == len(loader)` misses the end. Step after the loop, too"
            )
        if self._random is not None:
            self._random.restore()

    def _step(self, which: int, closure: Callable[[], Any] | None = None) -> Any:
        if self._left:
            raise RunError("optimizer.step() after pace.leave(): this worker takes no part any more.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._which = which
        self._binding.choose(which)
        self._began = self._position
        compute_s = self._emulation.finish(self._usual_batches())
        self._mention_written()
        self._exchange_gradient(compute_s)
        self._binding.fresh()
        if not self._fed or len(self._since) > 1:
            self._emulation.begin()  # no prepared loader, or another step to come: compute begins now
        self._since[which] = 0
        self._used, self._samples, self._fed, self._clip_to = [], 0, False, None
        return loss

    def _exchange_gradient(self, compute_s: float) -> None:
        """Unscale it if need be, and carry the iteration out; a scaler hears what it could not see."""
        assert self._optimizer is not None
        optimizer = parts_of(self._optimizer)[self._which]
        scaled, self._overflowed = taken_from(optimizer), False
        if scaled is not None and self._link.config.store_hosts > 1:
            raise ConfigError(
                f"a GradScaler needs a store on one host, but --store-hosts is "
                f"{self._link.config.store_hosts}. Leave it out, or use bfloat16, which needs no scaler."
            )
        self._scaled |= scaled is not None
        if self._clip_to is None and self._watch.changed(scaled is not None):
            self._mention_clipping()
        self._iterate(compute_s, self._binding.collect(scaled))
        elsewhere = scaled is not None and self._overflowed and not scaled.found_inf
        if elsewhere and not tell_scaler(optimizer):
            self._warn(
                f"rank {self.rank}: a step was skipped for an overflow elsewhere, but the scaler that called "
                "could not be told; its scale may differ from the others'. Use torch.amp.GradScaler"
            )

    def _clip(self, max_norm: float) -> None:
        if self._link.config.store_hosts > 1:
            raise ConfigError("pace.clip_grad_norm_() needs a store on one host. Use --clip-norm instead.")
        self._clip_to = max_norm

    def _mention_clipping(self) -> None:
        """Say once, for all, what becomes of gradients that the script changes by itself."""
        if self.lead:
            self._warn(
                "the script changes gradients between backward and step. Every worker changes its own: "
                "clip_grad_norm_ clips each by its own norm, before they are averaged. Write "
                "pace.clip_grad_norm_(max_norm) to clip what is stepped with; a constant factor is fine"
            )

    def _mention_written(self) -> None:
        """Say once that what the script wrote into parameters is lost with the store's next weights."""
        name = None if self.peer or self._written else self._binding.written()
        if name is not None:
            self._written = True
            self._warn(
                f"rank {self.rank} wrote to parameters by itself ({name!r}, say): that lasts until the next "
                "optimizer.step(), which brings the store's weights. Write before prepare, or train with a "
                "protocol that has no store, such as local_sgd"
            )

    def _usual_batches(self) -> float:
        """What was computed, in batches of the loader's size; several of one iteration count as one."""
        return 1.0 if self._batch is None else self._samples / (self._batch * max(len(self._used), 1))

    def _iterate(self, compute_s: float, missing: tuple[int, ...]) -> None:
        """The gradient is complete: push it, and sleep until released."""
        push = self._push(compute_s, missing, self._changed())
        try:
            release = self._link.push(push)
        except RunStopped:
            self._halted = self._stand()
            raise
        self._position, self._tells = release.position, release.tell
        self._overflowed = release.skipped

    def _changed(self) -> list[GroupSettings] | None:
        """The optimizer's settings, if a scheduler has changed them."""
        assert self._optimizer is not None
        settings = group_settings(self._optimizer)
        if len(settings) != len(self._sent):
            raise ConfigError("the optimizer got another parameter group after prepare. Add it before.")
        changed, self._sent = settings != self._sent, settings
        return settings if changed else None

    def _push(
        self, compute_s: float, missing: tuple[int, ...], settings: list[GroupSettings] | None = None
    ) -> Push:
        want = self._fed and self._link.granted == 0
        return Push(
            compute_s,
            self._samples,
            tuple(self._used),
            settings,
            missing,
            self._reported(),
            want=want,
            finite=self._looks and self._binding.finite(),
            scaled=self._scaled,
            clip=self._clip_to,
            which=self._which,
            again=self._again,
            weigh=self._weigh if len(self._since) > 1 else 0,
            state=self._stand() if self._tells else None,
        )

    @property
    def _again(self) -> bool:
        """Whether another of several optimizers has stepped with these data."""
        return len(self._since) > 1 and (not self._fed if self._feeds else self._which > 0)

    @property
    def _weigh(self) -> int:
        """What a gradient counts in a mean: the samples since its optimizer's last step."""
        return (self._since[self._which] or self._last) if len(self._since) > 1 else self._samples

    def _zero_grad(self, which: int, set_to_none: bool = True) -> None:
        self._binding.zero(set_to_none, which)

    def _at(self) -> int:
        return self._position

    def _state_now(self) -> tuple[dict[str, Tensor], State]:
        """Weights and what the optimizer remembers, both of one moment; buffers are this worker's own."""
        if not self._link.reaches_state:
            raise ConfigError(
                "pace.save() needs the whole run on one host. Use --checkpoint-every, and --resume to go on."
            )
        if self.peer:
            state = self._link.recall() if self._shared else self._own_state()
            return self._model_now(), state
        (tensors, values), layout = self._link.recall(weights=True), self._binding.layout
        views = [tensors.pop(f"model.{slot.name}") for slot in layout.parameters]
        return model_state(layout, views, self._link.segments[0].bytes), (tensors, values)

    def _idle(self) -> bool:
        return self._resumed

    def _away(self) -> None:
        if self._model is not None:
            self._link.away()
            self._binding.pull()

    def _back(self, values: dict[str, float], seconds: float) -> None:
        if self._model is not None:
            self._position = self._link.back(values, seconds).position
            self._binding.pull()

    def _leave(self) -> None:
        warning = self._emulation.warning()
        if warning:
            self._warn(f"rank {self.rank}: {warning}")
        waits = self._waits and self._link.config.listen is None
        if self._waits and not waits and not self._complete:
            self._warn(
                f"rank {self.rank} keeps {self._whose()} after pace.leave(): in a run on several hosts the "
                "model that is saved is handed to nobody. Read weights.safetensors"
            )
        self._link.leave(self._reported(), waits, self._halted)
        if waits:
            self._binding.settle(sealed=self._shared)
            self._complete = True

    def _mention_incomplete(self) -> None:
        """Say once that what a script saves now is not what the run saves."""
        if not (self._complete or self._left or self._evaluating or self._told_incomplete):
            self._told_incomplete = True
            self._warn(
                f"rank {self.rank} takes model.state_dict() of {self._whose()}, which is not what the run "
                "evaluates and saves. Call pace.leave() first, after the last step, or pace.save(path)"
            )

    def _whose(self) -> str:
        return "a look-ahead of the store's weights" if self._ahead else "the weights that it read last"

    def _plan(self, epochs: int) -> None:
        self._link.plan(epochs)

    @property
    def stopped(self) -> bool:
        return self._link.enough

    def _end_work(self, why: str) -> None:
        if self._model is None:
            raise ConfigError("pace.stop() before pace.prepare(): there is no training yet. Prepare first.")
        self._link.end_work(why)

    def report(self, **values: float) -> None:
        if not self._counted and "samples" in values:
            self._samples += int(values.pop("samples"))
        super().report(**values)

    def _warn(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._link.say(text)
