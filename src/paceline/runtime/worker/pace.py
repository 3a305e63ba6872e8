"""`Pace`, the object that `paceline.join()` returns: a script's handle on its run.

`prepare` changes the user's own objects in place, except the loader, so schedulers and scalers keep their
references and the training loop does not change. `optimizer.step()` pushes the gradient, waits for the
release and leaves the model with new weights, like a plain step.
"""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paceline.errors import ConfigError, RunError
from paceline.protocols.grid import Grid, check_axes
from paceline.runtime import seat
from paceline.runtime.checkpoints.optimizer_state import State, state_of
from paceline.runtime.checkpoints.whole_state import Loaded, Saved, marked, unmarked, write
from paceline.runtime.worker.after_step import AfterStep
from paceline.runtime.worker.data.partition import Partition
from paceline.runtime.worker.gather import gather
from paceline.runtime.worker.model.wrappers import refuse_wrapped
from paceline.runtime.worker.optimizer.replacing import innermost
from paceline.runtime.worker.optimizer.unprepared import Unprepared
from paceline.store.layout import Models, plain_name
from paceline.store.optimizers import group_settings
from paceline.store.together import Together

Metrics = Mapping[str, float] | float


class Pace(ABC):
    """A worker's handle on the run."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        """This worker's index."""
        self.size = size
        """How many workers the run was started with."""
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._values: dict[str, float] = {}
        self._left = self._stopped = False
        self._waits = False
        """Whether this worker left to get the model that is saved."""
        self._evaluating = False
        self._schedulers: list[LRScheduler] = []
        self._models: list[nn.Module] = []
        self._unwatch: Callable[[], None] = lambda: None
        """Stops the watch on unprepared optimizers."""
        self._loaded: Loaded | None = None
        """State that `load` has read, for the objects that will be prepared."""
        self._after_step = AfterStep()
        self._unprepared = Unprepared()
        self._unprepared.paused = lambda: self._evaluating or self._left

    @property
    def lead(self) -> bool:
        """Whether this worker prints and evaluates for all."""
        return self.rank == 0

    def print(self, *values: object) -> None:
        """Print on one worker only (the lead)."""
        if self.lead:
            print(*values, flush=True)

    def mesh(self, **axes: int) -> Grid:
        """The grid of workers over which a model is split:

        `pace.mesh(data=2, stage=4)`. The sizes given here are the script's defaults; `--mesh` overrides them.
        With one worker the mesh always has one place, so every script also trains alone, without a split.
        """
        check_axes(axes)
        if self.size > 1:
            raise ConfigError(
                f"pace.mesh() was called in a run without a mesh. Start the run with --mesh {Grid(axes)}."
            )
        return Grid(dict.fromkeys(axes, 1))

    def prepare(self, *objects: Any) -> Any:
        """Connect model, optimizer, loader and per-iteration schedulers to the run; returns them in the same
        order.

        Use the returned loader: it takes its batches from the run. Give all models and optimizers in one
        call: the step of each optimizer is an exchange of its own, and samples are counted once. A model
        without an optimizer stays local to each worker. Give the training loader and the schedulers that you
        step once per iteration. Schedulers that you step once per epoch are optional, and loaders for
        evaluation need no preparation. If a scheduler is built from the length of the prepared loader,
        prepare it later: `pace.prepare(scheduler)`.
        """
        if self._model is not None and objects and all(isinstance(o, LRScheduler) for o in objects):
            return self._prepare_later(objects)
        if self._model is not None:
            raise ConfigError(
                "prepare was called twice. Call it once, with model, optimizer and loader. In a notebook, "
                "call paceline.join() again first."
            )
        self._models = _at_least_one(objects, nn.Module, "model (torch.nn.Module)")
        _check_initialized(self._models)
        if self.size > 1:
            refuse_wrapped(self._models)
        given = _at_least_one(objects, torch.optim.Optimizer, "optimizer (torch.optim.Optimizer)")
        steps = [innermost(each) for each in given]
        optimizer = steps[0] if len(steps) == 1 else Together(steps)
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        model = self._models[0] if len(self._models) == 1 else Models(self._models, trained)
        loaders = [o for o in objects if isinstance(o, DataLoader)]
        if len(loaders) > 1:
            raise ConfigError(
                f"prepare takes one training loader, got {len(loaders)}. Do not prepare the others."
            )
        self._model, self._optimizer = model, optimizer
        self._schedulers = [o for o in objects if isinstance(o, LRScheduler)]
        if self._loaded is not None:
            self._loaded.into(model, optimizer, self._schedulers)
        self._after_step.bind(self._models, optimizer)
        self._heed_after_step(optimizer)
        loader = self._prepare(model, optimizer, loaders[0] if loaders else None)
        for scheduler in self._schedulers:
            self._watch_length(scheduler)
            self._prepare_scheduler(scheduler)
        if self.lead and self.size > 1:
            self._mention_strangers(objects)
            self._unwatch = self._unprepared.watch(optimizer, self._warn)
        results = tuple(loader if o in loaders else o for o in objects)
        return results[0] if len(results) == 1 else results

    def after_step(self, fn: Callable[..., Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Run `fn` on the weights after every optimizer step, wherever the step is taken; call this before
        `prepare`.

        Use it for operations that belong to every step but not to the optimizer: clamping weights, limiting a
        norm, a projection. `fn` writes to the model's trained parameters under `torch.no_grad()`, and its
        result must depend on them alone. It gets the prepared models if it takes arguments. With `optimizer`
        it runs only after the steps of that optimizer. All workers must register the same functions.
        """
        if self._model is not None:
            raise ConfigError(
                "pace.after_step() was called after pace.prepare(), when the run has already begun without "
                "it. Call it before."
            )
        self._after_step.add(fn, optimizer)

    def _heed_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps are taken in this process, so register the functions as hooks on them."""
        self._after_step.hook(optimizer)

    def _prepare_later(self, schedulers: tuple[LRScheduler, ...]) -> Any:
        """Prepare schedulers that were built from the length of the prepared loader."""
        self._schedulers += schedulers
        for scheduler in schedulers:
            self._prepare_scheduler(scheduler)
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def _watch_length(self, scheduler: LRScheduler) -> None:
        """Warn if a schedule and the run differ in length. With one worker they cannot."""
        return

    def _mention_strangers(self, objects: tuple[Any, ...]) -> None:
        for each in objects:
            if not isinstance(each, nn.Module | torch.optim.Optimizer | DataLoader | LRScheduler):
                self._warn(
                    f"prepare did not change a {type(each).__name__}: every worker sees all of it. To share "
                    "data among workers, give a torch.utils.data.DataLoader"
                )

    def local(self, *objects: Any) -> Any:
        """Declare that each worker keeps its own copy of these optimizers, models or tensors; returns them.

        Objects that are not prepared are never exchanged. When such an optimizer steps, a warning says so,
        unless it was declared here.
        """
        self._unprepared.declare(objects)
        return objects[0] if len(objects) == 1 else objects

    def partition(self, shuffle: bool = False) -> Partition:
        """The rows that the engine assigned to this worker (Spark's `train_on`), as an iterable dataset."""
        place = seat.mine()
        if place is None or place.partition is None:
            raise ConfigError(
                "pace.partition() was called, but this worker was given no rows. Start the run with "
                "paceline.engines.spark.train_on(data, script), or use a dataset of your own."
            )
        return Partition(place.partition, shuffle, place.config.seed + self.rank)

    def epochs(self, count: int) -> Iterator[int]:
        """`range(count)`; also tells the run its number of epochs, for progress bars and for protocols with
        phases."""
        if self.lead:
            self._plan(count)
        yield from takewhile(lambda _: not self.stopped, range(count))

    def report(self, **values: float) -> None:
        """Report a loss or other figures; they are written to the trace.

        Without a prepared loader, report `samples`, the size of the current batch, so that the run can count
        samples.
        """
        self._values |= {
            name: value if type(value) is float else _figure(value, f"pace.report({name}=...)")
            for name, value in values.items()
        }

    def evaluate(self, fn: Callable[..., Metrics]) -> Mapping[str, float] | None:
        """Call `fn` on the lead with a consistent snapshot of the model (passed to `fn` if it takes an
        argument).

        `fn` returns the accuracy, or a dictionary such as `{"accuracy": 0.97, "loss": 0.1}`. All workers may
        call this. It returns the figures on the lead; on other workers it returns None at once.
        """
        if not self.lead or self._idle():
            return None
        self._away()
        began = time.perf_counter()
        self._evaluating = True
        values = self._measure(fn)
        self._evaluating = False
        self._back(values, time.perf_counter() - began)
        return values

    def consensus(self) -> float:
        """How far apart the replicas of a peer run are: the root mean square distance from their mean.

        Any worker may call this, alone or with others. It waits until all workers pause, as `evaluate` does.
        If there is only one model (one worker, or a paced protocol), it is 0.
        """
        if self._model is None:
            raise ConfigError(
                "pace.consensus() was called before pace.prepare(): there is no model yet. Prepare first."
            )
        self._check_here("pace.consensus()")
        return self._apart()

    def gather(self, x: Any) -> torch.Tensor:
        """The rows of `x` of all workers, by rank: tensors joined along the first dimension, or numbers.

        All remaining workers must call this, and all get the result; meanwhile no other worker waits for
        them. Under a protocol without a store they must call it after equally many iterations. With one
        worker it returns `x`.
        """
        self._check_here("pace.gather()")
        return gather(x, self._swap)

    def _swap(self, data: bytes, more: bool) -> dict[int, bytes]:
        return {self.rank: data}

    def stop(self, why: str = "") -> None:
        """End training for all workers, as after the last epoch: loaders and `epochs` end.

        Any worker may call this; usually it is the lead, which evaluates. `why` is written to the trace. A
        worker that is computing a gradient still pushes it. A loop without a prepared loader must check
        `pace.stopped`.
        """
        if not (self.stopped or self._left):
            self._stopped = True
            self._end_work(why)

    @property
    def stopped(self) -> bool:
        """Whether a worker has ended training (`stop`), as far as this worker knows."""
        return self._stopped

    @property
    def left(self) -> bool:
        """Whether this worker has left the run."""
        return self._left

    def leave(self) -> None:
        """Leave the run and get the model that the run saves: the weights in `weights.safetensors`.

        No worker waits for this one any more, but this one waits until all have left or ended. At its end a
        script leaves by itself, without waiting.
        """
        if not self._left:
            self._left = True
            self._waits = self._model is not None
            self._unwatch()
            self._leave()

    def depart(self) -> None:
        """The script has ended: leave without waiting."""
        if not self._left:
            self._left = True
            self._unwatch()
            self._leave()

    def withholds(self, error: BaseException) -> bool:
        """Whether to hide the script's exception, because another worker's error explains it."""
        return False

    def _check_here(self, what: str, instead: str = "") -> None:
        """Refuse calls that only a worker in the run may make."""
        if self._left:
            raise RunError(f"{what} after pace.leave(): this worker takes no part any more.{instead}")

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor | None:
        """Clip the gradient of the next `optimizer.step()` to this norm; call it between backward and step.

        If a round is one step (lockstep, all-reduce) it clips the mean of all gradients, as one process with
        the whole batch would. Otherwise a step uses one worker's gradient, and that is clipped. With one
        worker it is torch's own function and returns the norm; with several workers the norm is not known
        yet.
        """
        if self._model is None:
            raise ConfigError(
                "pace.clip_grad_norm_() was called before pace.prepare(): there is no model yet. Prepare "
                "first."
            )
        if not max_norm > 0:
            raise ConfigError(f"pace.clip_grad_norm_() needs a norm above 0, got {max_norm!r}.")
        return self._clip(float(max_norm))

    def _clip(self, max_norm: float) -> torch.Tensor | None:
        assert self._optimizer is not None
        groups = self._optimizer.param_groups
        return torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], max_norm)

    def save(self, path: str | Path, **values: Any) -> None:
        """Write model, optimizer, schedulers and position to a folder: safetensors and JSON, no pickle.

        All workers may call it; the lead writes the model that would be evaluated now, its optimizer's state
        (under peer protocols the lead's own), and the plain `values` that `load` will return.
        """
        if self._model is None or self._optimizer is None:
            raise ConfigError(
                "pace.save() was called before pace.prepare(): there is no model yet. Prepare first."
            )
        self._check_here("pace.save()", " Save before.")
        if not self.lead or self._idle():
            return
        self._evaluating = True  # it is what is evaluated that is taken
        model, (tensors, remembered) = self._state_now()
        self._evaluating = False
        schedulers = [marked(each.state_dict(), type(each).__name__) for each in self._schedulers]
        saved = Saved(
            position=self._at(),
            optimizer=remembered,
            settings=group_settings(self._optimizer),
            schedulers=schedulers,
            values={name: marked(value, f"pace.save({name}=...)") for name, value in values.items()},
        )
        write(Path(path), model, {n: t.contiguous() for n, t in tensors.items()}, saved)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read what `save` wrote.

        Call it on all workers before `prepare`, which restores the state of the given objects. It returns the
        saved values. Training then starts a new run from this state; to continue a stopped run exactly where
        it was, use --resume.
        """
        if self._model is not None:
            raise ConfigError(
                "pace.load() was called after pace.prepare(), when other workers may already train. Call "
                "it before."
            )
        self._loaded = Loaded(Path(path))
        return {name: unmarked(value) for name, value in self._loaded.saved.values.items()}

    def _at(self) -> int:
        """Iterations of the run so far, as a prepared scheduler counts them."""
        return 0

    def _state_now(self) -> tuple[dict[str, torch.Tensor], State]:
        """The model and the optimizer's state."""
        return self._model_now(), self._own_state()

    def _model_now(self) -> dict[str, torch.Tensor]:
        assert self._model is not None
        named = self._model.state_dict(keep_vars=True).items()
        return {plain_name(name): tensor.detach().contiguous().clone() for name, tensor in named}

    def _own_state(self) -> State:
        assert self._optimizer is not None
        groups = self._optimizer.param_groups
        return state_of(self._optimizer, [p for g in groups for p in g["params"] if p.requires_grad])

    def _apart(self) -> float:
        return 0.0

    def _measure(self, fn: Callable[..., Metrics]) -> dict[str, float]:
        model = self._model
        modes = [] if model is None else [(part, part.training) for part in model.modules()]
        if model is not None:
            model.eval()
        try:
            with torch.no_grad():
                wants_model = bool(inspect.signature(fn).parameters)
                if wants_model and not self._models:
                    raise ConfigError(
                        "pace.evaluate() before pace.prepare(): there is no model yet. Prepare first."
                    )
                result = fn(*self._models) if wants_model else fn()
        finally:
            for part, training in modes:
                part.training = training
        named = result if isinstance(result, Mapping) else {"accuracy": result}
        return {name: _figure(value, f"{name} in pace.evaluate") for name, value in named.items()}

    def _reported(self) -> dict[str, float] | None:
        values, self._values = self._values, {}
        return values or None

    def end(self, error: BaseException | None, text: str) -> None:
        """The script has ended. Subclasses write their record or tell the store here."""
        return

    @abstractmethod
    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any: ...

    # -- what a worker among others does; one that nobody waits for has nobody to tell -------------

    def _prepare_scheduler(self, scheduler: LRScheduler) -> None:
        return

    def _idle(self) -> bool:
        """Whether a resumed script is still repeating the part that was done before."""
        return False

    def _away(self) -> None:
        return

    def _back(self, values: dict[str, float], seconds: float) -> None:
        return

    def _leave(self) -> None:
        return

    def _plan(self, epochs: int) -> None:
        return

    def _end_work(self, why: str) -> None:
        return

    def _warn(self, text: str) -> None:
        print(f"warning: {text}", flush=True)


def _check_initialized(models: list[nn.Module]) -> None:
    """Refuse lazy layers that have no shape yet."""
    named = (item for model in models for item in model.named_parameters())
    name = next((n for n, p in named if isinstance(p, nn.parameter.UninitializedParameter)), None)
    if name is not None:
        raise ConfigError(
            f"{name!r} of the model has no shape yet: a lazy layer gets its shape from its first batch. "
            "Give the model a batch before pace.prepare()."
        )


def _at_least_one(objects: tuple[Any, ...], kind: type, what: str) -> list[Any]:
    found = [o for o in objects if isinstance(o, kind)]
    if not found:
        raise ConfigError(f"prepare needs at least one {what}, got none.")
    return found


def _figure(value: Any, where: str) -> float:
    if isinstance(value, torch.Tensor):
        value = value.detach()  # a loss that is still tied to its graph is a number all the same
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{where} takes a number, got {value!r}. Give a float, or item() of it.") from None
