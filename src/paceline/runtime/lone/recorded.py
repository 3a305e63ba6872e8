"""A lone worker under an engine: plain PyTorch, with the books kept beside it.

Model, optimizer, gradients and data order are left exactly as they are, so one worker equals plain
PyTorch bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.config import RunConfig
from paceline.errors import BadGradient, ConfigError, RunStopped
from paceline.fabric.stop_signals import answer
from paceline.protocols import Pacing, Peer
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.rules.compression import check_family
from paceline.protocols.settings import make_any, resolved
from paceline.runtime.checkpoints.random_state import RandomState
from paceline.runtime.checkpoints.writer import CheckpointWriter
from paceline.runtime.lone.closures import checked_step
from paceline.runtime.lone.gradients import clip, dense, gradients_of, sums_are_finite
from paceline.runtime.lone.saving import LoneState, save_lone
from paceline.runtime.lone.schedules import LoneSchedules
from paceline.runtime.worker.data.loader import count_samples, source_of
from paceline.runtime.worker.data.pass_log import PassLog
from paceline.runtime.worker.emulation import Emulation
from paceline.runtime.worker.optimizer.replacing import replace_step
from paceline.runtime.worker.optimizer.scaling import Scaled, taken_from
from paceline.runtime.worker.pace import Pace
from paceline.store.disk.checkpoint import (
    VERSION,
    Snapshot,
    other_model,
    read_checkpoint,
)
from paceline.store.disk.checksums import unchecked
from paceline.store.disk.reserve import Reserve
from paceline.store.disk.tensor_files import check_can_be_saved
from paceline.store.layout import plain_name
from paceline.store.ledger import Ledger
from paceline.store.optimizers import export_state, import_state
from paceline.store.together import Together, parts_of
from paceline.store.work.budget import Source
from paceline.trace import LastingTrace, events

FLUSH_S = 0.1


class _Step(NamedTuple):
    """A step that was taken and is not on record yet."""

    now: float
    samples: int
    compute_s: float
    exchange_s: float
    usable: bool
    values: dict[str, float] | None


class RecordedSolo(Pace):
    """One worker under an engine: as alone, on record."""

    def __init__(self, config: RunConfig, protocol: str | None, settings: dict[str, Any]) -> None:
        super().__init__(0, 1)
        self._config = config
        name = config.protocol or protocol or "bsp"
        asked = make_any(name, (settings if name == protocol else {}) | config.settings)
        pacing = _alone(name, asked)
        check_family(config.compress, name, asked)
        self._trace = LastingTrace(config.path / "trace.jsonl", config.trace_limit_bytes)
        self._reserve = Reserve(config.path)
        plain = msgspec.structs.replace(config, correct="none")
        self._ledger = Ledger(plain, name, pacing, self._trace.write, settings=resolved(asked))
        if config.correct not in ("auto", "none"):
            text = f"--correct {config.correct} is ignored: one worker alone is plain PyTorch"
            self._trace.write(events.Note(0.0, "info", text))
        self._emulation = Emulation(config, 0)
        self._zero_s = time.monotonic()
        self._flush_at = 0.0
        self._samples = self._batches = self._passes = 0
        self._unused = 0
        """Batches since the last step."""
        self._log = PassLog()
        self._loader: Any = None
        self._began: RandomState | None = None
        self._resumed: LoneState | None = None
        self._repeats = False
        self._steps = self._skipped = 0
        self._taken: list[_Step] = []
        self._schedules = LoneSchedules()
        self._stop = self._stepped_now = False
        self._unsaved = ""
        self._keeping = CheckpointWriter(config, self._trace, self.now)
        answer(self._ask_to_stop)

    def now(self) -> float:
        """Seconds since training began."""
        return time.monotonic() - self._zero_s

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
        check_can_be_saved(model)
        if self._config.resume is not None:
            self._restore(model, optimizer)
        for part in parts_of(optimizer):
            clips = self._config.clip_norm is not None
            step = checked_step(part, part.step, partial(self._check, part), clips)
            replace_step(part, partial(self._step, step))
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        gradient = sum(p.numel() * p.element_size() for p in trained)
        self._ledger.write(
            events.ModelReady(
                0.0, sum(p.numel() for p in model.parameters()), size, gradient, *_length(loader)
            )
        )
        for text in self._reserve.take(size * (4 if type(optimizer).__name__ != "SGD" else 3)):
            self._warn(text)
        self._zero_s = time.monotonic()
        self._ledger.join(0, 0.0)
        self._keeping.begin(self._steps)
        if loader is None:
            self._emulation.begin()
        self._loader, self._ledger.alone = loader, _source(loader)
        return None if loader is None else _Counted(loader, self)

    def _prepare_scheduler(self, scheduler: LRScheduler) -> None:
        if self._resumed is not None and self._steps and isinstance(self._optimizer, Together):
            raise ConfigError(
                "a run with one worker and several optimizers cannot be resumed with prepared schedulers, "
                "because it does not record how often each was stepped. Leave schedulers out of "
                "pace.prepare(), and step them per epoch."
            )
        self._schedules.prepare(scheduler, self._steps)

    def batches(self, loader: Any) -> Iterator[Any]:
        """The loader's own batches, counted; what a resumed run has done is passed over."""
        self._passes += 1
        self._log.begins()
        self._schedules.pass_begins(self._steps)
        if self._resumed is None or self._passes > self._resumed.passes:
            yield from self._pass(loader)
        self._schedules.pass_ends(self._steps)

    def _pass(self, loader: Any) -> Iterator[Any]:
        for batch in self._remaining(loader):
            if self.stopped:
                return
            self._batches += 1
            self._unused += 1
            self._log.arrived()
            self._samples += count_samples(batch)
            self._repeats = False
            self._emulation.begin()
            yield batch
            if self._stepped_now:  # only here is the script done with it: what others step, is stepped
                self._rest()
        self._log.ends()

    def _remaining(self, loader: Any) -> Iterator[Any]:
        """A pass over the loader. One that was broken off begins as it did then, and goes on from there."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.began is not None:
            resumed.began.restore(loader)
        self._began = RandomState.now(loader)
        batches = iter(loader)
        self._batches = 0
        if resumed is not None:
            self._batches = pass_over(batches, resumed.batches, self._note)
            resumed.stopped.restore(loader)
        yield from batches

    def _step(self, step: Callable[..., tuple[bool, Any]], *args: Any, **kwargs: Any) -> Any:
        compute_s = self._emulation.finish()
        began = time.perf_counter()
        usable, result = step(*args, **kwargs)
        spent, now = time.perf_counter() - began, self.now()
        self._taken.append(_Step(now, self._samples, compute_s, spent, usable, self._reported()))
        self._samples = self._unused = 0
        self._steps += 1
        self._skipped += not usable
        if now >= self._flush_at:
            self._write_down()
            self._keeping.tell()
            self._trace.flush()
            self._flush_at = now + FLUSH_S
        self._stepped_now = True
        if self._loader is None:
            self._rest()
        return result

    def _rest(self) -> None:
        """Between two batches, where a run can be stopped and kept. Without a loader: after a step."""
        self._stepped_now = False
        if self._stop:
            raise RunStopped("interrupted")
        if self._keeping.due(self._steps):
            self._write_down()
            self._keeping.keep(self._steps, self._ledger.samples, self._take)
            self._keeping.tell()

    def _check(self, optimizer: torch.optim.Optimizer) -> bool:
        gradients = gradients_of(optimizer)
        if getattr(optimizer, "found_inf", None) is not None:
            return self._under_scaler(optimizer, gradients)
        if self._config.clip_norm is None and sums_are_finite(gradients):
            return True
        norm = torch.nn.utils.get_total_norm(gradients)
        if math.isfinite(norm) or all(bool(torch.isfinite(g).all()) for g in gradients):
            if self._config.clip_norm is not None:
                everything = (p for group in optimizer.param_groups for p in group["params"])
                trained = [p for p in everything if p.requires_grad]
                torch.nn.utils.clip_grads_with_norm_(trained, self._config.clip_norm, norm)
            return True
        if self._config.bad_gradient == "stop":
            raise BadGradient(
                f"rank 0 has NaN or infinity in the gradient of {self._bad_parameter()!r}; nothing was "
                "applied. Lower the learning rate, clip (--clip-norm), or use --bad-gradient skip."
            )
        return False

    def _under_scaler(self, optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> bool:
        """A fused optimizer unscales and skips by itself; to be clipped, gradients are unscaled before."""
        if self._config.clip_norm is not None:
            scaled = taken_from(optimizer)
            assert scaled is not None
            if scaled.found_inf:
                return False
            Scaled(scaled.scale, False).unscale(gradients)
            clip(gradients, self._config.clip_norm)
        return True

    def _bad_parameter(self) -> str:
        assert self._model is not None
        for name, p in self._model.named_parameters():
            if p.grad is not None and not bool(torch.isfinite(dense(p.grad)).all()):
                return name
        return "?"

    def _write_down(self) -> None:
        """Put the steps taken since the last time on record.

        Many at once: between two steps a model's computing has driven these lines and what they
        touch out of the caches, and once per step they cost several times what they cost here.
        """
        for step in self._taken:
            decision = self._ledger.push(0, step.now, step.samples, usable=step.usable)
            times = step.compute_s, step.exchange_s
            self._ledger.pushed(decision, step.now, step.samples, *times, 1.0, skipped=not step.usable)
            self._write_values(step.now, step.values)
        self._taken.clear()

    def _write_values(self, now: float, values: dict[str, float] | None) -> None:
        if values:
            self._trace.write(events.Reported(now, 0, self._ledger.pacer.clocks.clock(0), values))

    def _idle(self) -> bool:
        return self._repeats

    def _back(self, values: dict[str, float], seconds: float) -> None:
        self._write_down()
        clocks = self._ledger.pacer.clocks
        t = self.now() - seconds
        self._trace.write(events.Evaluated(t, 0, clocks.version, self._ledger.samples, values, seconds))

    def _plan(self, epochs: int) -> None:
        self._write_down()
        per_epoch = _length(self._loader)[0]
        self._ledger.pacer.plan(None if per_epoch is None else epochs * per_epoch)
        self._trace.write(events.Planned(self.now(), epochs, self._ledger.samples_before))

    def _end_work(self, why: str) -> None:
        self._write_down()
        self._ledger.end_work(0, self.now(), why)

    def report(self, **values: float) -> None:
        if self._loader is None and "samples" in values:
            self._samples += int(values.pop("samples"))
        super().report(**values)

    def _note(self, text: str) -> None:
        self._trace.write(events.Note(self.now(), "info", text))
        self._trace.flush()

    def _warn(self, text: str) -> None:
        self._write_down()
        self._trace.write(events.Note(self.now(), "warning", text))

    def _ask_to_stop(self) -> None:
        self._stop = True

    def _leave(self) -> None:
        pass

    # -- ending -------------------------------------------------------------------------------

    def end(self, error: BaseException | None, text: str) -> None:
        """Write what remains of the run; called by the engine when the script is over."""
        self._save_rest(error, text)
        status = "finished" if error is None else "stopped" if isinstance(error, RunStopped) else "failed"
        self._close(status, text, isinstance(error, ConfigError))

    def _save_rest(self, error: BaseException | None, text: str) -> None:
        if 0 not in self._ledger.pacer.clocks.active:
            return
        stopped = isinstance(error, RunStopped)
        reason = "finished" if error is None else "stopped" if stopped else "failed"
        self._write_down()
        self._write_values(self.now(), self._reported())
        self._ledger.leave(0, self.now(), reason, text)
        if self._ledger.source is not None:
            self._ledger.passes[0] = self._log.told(self._ledger.source.batches, self._unused)
        undone = self._ledger.undone() if error is None else ""
        if undone:
            self._warn(undone)
        if self._skipped:
            self._warn(f"{self._skipped} gradients were not finite and were skipped")
        self._keeping.tell(wait=True)
        taken = None if error is None else self._snapshot()
        self._unsaved = save_lone(self._config, self._reserve, self._model_now(), taken, self._warn)

    def _close(self, status: str, text: str, mistake: bool) -> None:
        """The last word of the trace."""
        if self._unsaved:
            status, text = "failed", ". ".join(each for each in (text.rstrip("."), self._unsaved) if each)
        due = self._ledger.samples_due
        self._trace.write(events.RunEnded(self.now(), status, text, mistake, due))  # type: ignore[arg-type]
        self._trace.close()

    def _at(self) -> int:
        return self._steps

    def _take(self) -> Callable[[], Snapshot]:
        taken = self._snapshot()
        return lambda: taken

    def _snapshot(self) -> Snapshot:
        assert self._optimizer is not None
        tensors, values = export_state(self._optimizer)
        state = LoneState(
            checkpoint=VERSION,
            passes=max(self._passes - 1, 0),
            batches=self._batches,
            steps=self._steps,
            version=self._ledger.pacer.clocks.version,
            samples=self._ledger.samples,
            optimizer=values,
            began=self._began,
            stopped=RandomState.now(self._loader),
            schedules=self._schedules.standing(self._steps, self._loader is None or self._stepped_now),
            origins=self._schedules.origins,
        )
        return Snapshot(self._model_now(), tensors, "lone.json", msgspec.json.encode(state))

    def _restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        folder = Path(self._config.resume or "")
        state, weights, tensors = read_checkpoint(folder, "lone.json", LoneState)
        own = model.state_dict(keep_vars=True)
        if {plain_name(n): t.shape for n, t in own.items()} != {n: t.shape for n, t in weights.items()}:
            raise other_model(folder)
        model.load_state_dict({n: weights[plain_name(n)] for n in own})  # a module may save in another form
        import_state(optimizer, tensors, state.optimizer)
        self._resumed, self._repeats, self._steps = state, True, state.steps
        for text in unchecked(str(folder)):
            self._ledger.write(events.Note(0.0, "info", text))
        self._schedules.go_on(state.schedules, state.origins, state.steps)
        self._ledger.resume_at(state.version, state.samples, 0, state.steps)


class _Counted:
    """The user's loader, telling the worker of every batch."""

    def __init__(self, loader: Any, pace: RecordedSolo) -> None:
        self._loader, self._pace = loader, pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._pace.batches(self._loader)


def _alone(name: str, protocol: Pacing | Peer) -> Pacing:
    """What keeps the books of one worker; a peer with nobody to meet just trains, if that is its way."""
    if not isinstance(protocol, Peer):
        return protocol
    if not protocol.plain_alone:
        raise ConfigError(
            f"one worker under {name!r} would not train as plain PyTorch does, and has no other worker to "
            "exchange with. Use --workers 2 or more, or another protocol."
        )
    return BSP()


def pass_over(batches: Iterator[Any], count: int, say: Callable[[str], None], quiet_s: float = 2.0) -> int:
    """Load what was done before a run was stopped, so that everything random stands where it did. How many
    batches there were; `say` is told now and then if it takes longer than `quiet_s`."""
    done, told = 0, time.monotonic()
    for done, _ in enumerate(islice(batches, count), 1):
        if done < count and time.monotonic() - told > quiet_s:
            told = time.monotonic()
            say(f"loading once more what was done before the run was stopped: batch {done:,} of {count:,}")
    return done


def _source(loader: Any) -> Source | None:
    """What an epoch is; None where that cannot be known, or is no more than this worker's share."""
    try:
        return None if loader is None else source_of(loader)[0]
    except ConfigError:
        return None


def _length(loader: Any) -> tuple[int | None, int | None]:
    try:
        return len(loader.dataset), len(loader)
    except (TypeError, AttributeError):
        return None, None
