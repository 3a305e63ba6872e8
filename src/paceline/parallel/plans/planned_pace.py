"""What a script holds when it runs under a plan: the model in place as planned, and a record of what it
took."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from paceline.config import RunConfig
from paceline.decoding import decode_message
from paceline.errors import BadGradient, ConfigError
from paceline.parallel.mesh import gather_bytes
from paceline.parallel.plans.meter import Meter
from paceline.parallel.plans.sharding import ShardedModel, global_norm, shard
from paceline.parallel.plans.shared_loader import SharedLoader
from paceline.parallel.same_data import check_same_data
from paceline.plan.osdp.plan import OsdpPlan
from paceline.runtime.checkpoints.random_state import seed_apart
from paceline.runtime.worker.data.unused import Unused
from paceline.runtime.worker.optimizer.replacing import replace_step
from paceline.runtime.worker.optimizer.scaling import taken_from, tell_scaler, welcome_scalers
from paceline.runtime.worker.pace import Metrics, Pace
from paceline.store.optimizers import check_suited
from paceline.store.together import Together
from paceline.store.work.due import LoaderPasses


class PlannedPace(Pace):
    """One worker of a planned run."""

    def __init__(self, rank: int, size: int, config: RunConfig) -> None:
        super().__init__(rank, size)
        self._config = config
        self._began = time.perf_counter()
        self.samples = self.steps = 0
        self.figures: dict[str, float] = {}
        self.loss: float | None = None
        self.meter: Meter | None = None
        self._is_whole = False
        self._unused: Unused | None = None
        self._dealt: SharedLoader | None = None

    @abstractmethod
    def _place(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]
    ) -> SharedLoader:
        """Carry the plan out; the batches of this rank."""

    @abstractmethod
    def _average(self) -> None:
        """Make gradients those of the whole batch."""

    @abstractmethod
    def _norm(self, parameters: list[Tensor]) -> float:
        """Of the whole gradient of these parameters; all ranks call it."""

    @abstractmethod
    def whole_state(self) -> dict[str, Tensor]:
        """All weights, whole; all ranks call it."""

    def _heed_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._after_step.refuse("under a plan every worker has pieces of it. Leave --plan out.")

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
        if loader is None:
            raise ConfigError(
                "a plan needs the training loader: call pace.prepare(model, optimizer, loader)."
            )
        check_suited(optimizer)
        if isinstance(optimizer, Together):
            raise ConfigError(
                f"a plan trains with one optimizer, prepare got {len(optimizer.optimizers)}. Give it one "
                "with a parameter group for each, or train without a plan."
            )
        if any(p.device.type != "cpu" for p in model.parameters()):
            raise ConfigError(
                "plans run on CPU workers so far; the model is on another device. Leave it on the CPU."
            )
        model.register_forward_pre_hook(self._begin)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        self.meter = Meter(size)
        check_same_data(loader, self.size)
        made = self._place(model, optimizer, loader)
        if made.left_over and self.lead:
            self._warn(
                f"{made.left_over} of {made.samples} samples of every epoch are too few for a step: unused"
            )
        if self.lead and self._own_batches:
            self._unused = Unused(len(made), self._warn)
            made.on_batch = self._unused.arrived
        welcome_scalers(optimizer)
        replace_step(optimizer, lambda *a, plain=optimizer.step, **k: self._step(plain, *a, **k))
        self._sizes = self._group_sizes()
        self._dealt = made
        self._began = time.perf_counter()
        self.meter.begin()
        return made

    _own_batches = True

    @property
    def prepared(self) -> bool:
        """Whether there is a model."""
        return self._model is not None

    def _begin(self, model: nn.Module, args: Any) -> None:
        """A forward pass begins: gradients that were made whole for a step must have been used by now."""
        if self._is_whole and any(p.grad is not None for p in model.parameters()):
            raise ConfigError(
                "gradients were clipped, and then the model was called before optimizer.step(). Clip once, "
                "just before the step."
            )
        self._is_whole = False

    def make_whole(self) -> None:
        """Gradients become those of the whole batch, once for each step."""
        if not self._is_whole:
            self._average()
            self._is_whole = True

    def clip_these(self, parameters: list[Tensor], most: float) -> Tensor:
        """Scale the whole gradient of these parameters so that its norm is at most this; the norm it had."""
        self.make_whole()
        norm = self._norm(parameters)
        if norm > most:
            _multiply(parameters, most / (norm + 1e-6))
        return torch.tensor(norm)

    def _trained(self) -> list[Tensor]:
        assert self._optimizer is not None
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _clip(self, max_norm: float) -> Tensor:
        return self.clip_these(self._trained(), max_norm)

    def _group_sizes(self) -> list[int]:
        assert self._optimizer is not None
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def _check_trained(self) -> None:
        """Refuse parameters that the optimizer was given later and that are not the model's as it is now."""
        assert self._model is not None
        if (sizes := self._group_sizes()) == self._sizes:
            return
        mine = {id(p) for p in self._model.parameters()}
        if any(id(p) not in mine for p in self._trained()):
            raise ConfigError(
                "the optimizer got parameters after pace.prepare() that are not the prepared model's: a "
                "plan replaces the model's parameters. Add them before, or take them from the prepared "
                "model."
            )
        self._sizes = sizes

    def _step(
        self, plain: Callable[..., Any], closure: Callable[[], Any] | None = None, **others: Any
    ) -> Any:
        """A closure comes first: the gradients that it computes are this rank's, and are made whole as others
        are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_trained()
        self.make_whole()
        made = self._step_whole(lambda: plain(**others))
        return made if closure is None else loss

    def _step_whole(self, plain: Callable[[], Any]) -> Any:
        assert self.meter is not None
        assert self._optimizer is not None
        trained, scaled = self._trained(), taken_from(self._optimizer)
        if scaled is not None and scaled.scale is not None:
            _multiply(trained, 1.0 / scaled.scale)
        if self._config.clip_norm is not None:
            self.clip_these(trained, self._config.clip_norm)
        finite = all(bool(torch.isfinite(_local(p.grad)).all()) for p in trained if p.grad is not None)
        if not finite and scaled is None:
            raise BadGradient(f"NaN or infinity in a gradient of rank {self.rank} at step {self.steps}.")
        made = plain() if scaled is None or self._all_usable(finite and not scaled.found_inf) else None
        self._is_whole = False
        self.steps += 1
        assert self._dealt is not None
        self.samples += self._dealt.used()
        self.loss = (self._reported() or {}).get("loss", self.loss)
        self.meter.step()
        if self._unused is not None:
            self._unused.stepped()
        return made

    def _all_usable(self, mine: bool) -> bool:
        """Under a scaler: whether no rank has an overflow. If one has, all skip the step, and all scales
        fall."""
        assert self._optimizer is not None
        overflowed = torch.tensor(float(not mine))
        dist.all_reduce(overflowed)
        if overflowed and not tell_scaler(self._optimizer):
            raise ConfigError(
                "gradients overflowed, but optimizer.step() was not called by a scaler that the run knows. "
                "Use torch.amp.GradScaler, or bfloat16, which needs none."
            )
        return not overflowed

    def evaluate(self, fn: Callable[..., Metrics]) -> Mapping[str, float] | None:
        """As ever, but all ranks compute it: none of them has the whole model. So all have the figures, the
        lead's: schedulers that look at them have to do the same everywhere."""
        assert self.meter is not None
        self.meter.pause()
        told = gather_bytes(msgspec.msgpack.encode(self._measure(fn)), self.size)
        self.figures = decode_message(told[0], kind=dict[str, float])
        return self.figures

    def summary(self) -> dict[str, Any]:
        """What this rank has seen."""
        seconds = time.perf_counter() - self._began
        meter = self.meter
        return {
            "seconds": seconds,
            "samples": self.samples,
            "samples_due": None if self._dealt is None else self._dealt.due,
            "passes": msgspec.to_builtins(
                LoaderPasses() if self._dealt is None else self._dealt.told_passes()
            ),
            "loss": self._values.get("loss", self.loss),
            "accuracy": self.figures.get("accuracy"),
            "step_s": None if meter is None else meter.step_s,
            "peak_bytes": None if meter is None else meter.peak_bytes,
        }

    def _swap(self, data: bytes, more: bool) -> dict[int, bytes]:
        return dict(enumerate(gather_bytes(data, self.size)))

    def _leave(self) -> None:
        raise ConfigError(
            "pace.leave() does not work under a plan: the other workers cannot continue without this one's "
            "part. Leave it out."
        )

    def _end_work(self, why: str) -> None:
        raise ConfigError(
            "pace.stop() cannot end a planned run yet: its workers have to stop at the same step."
        )


class OsdpPace(PlannedPace):
    """Sharded data parallel: every rank has its own batch, and holds what the plan says."""

    def __init__(self, rank: int, size: int, config: RunConfig, plan: OsdpPlan) -> None:
        super().__init__(rank, size, config)
        self._osdp = plan
        self._sharded: ShardedModel | None = None

    def _place(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]
    ) -> SharedLoader:
        if loader.batch_size != self._osdp.batch:
            raise ConfigError(
                f"the plan is for a batch of {self._osdp.batch} per worker, the script's loader has "
                f"{loader.batch_size}. Give the script that batch size, or plan again with --batch "
                f"{loader.batch_size}."
            )
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()) and self.lead:
            self._warn(
                "BatchNorm sees each worker's own batch, as under DDP; the statistics that are kept are "
                "those of rank 0"
            )
        self._sharded = shard(model, optimizer, self._osdp, init_device_mesh("cpu", (self.size,)))
        seed_apart(self._config.seed, self.rank)
        return SharedLoader(loader, self._osdp.batch, self.rank, self.size, self._config.seed)

    def _average(self) -> None:
        assert self._sharded is not None
        self._sharded.average()

    def _norm(self, parameters: list[Tensor]) -> float:
        return global_norm(parameters)

    def whole_state(self) -> dict[str, Tensor]:
        assert self._sharded is not None
        return self._sharded.whole_state()


def same_for_all(digest: str) -> None:
    """Refuse to go on unless all ranks hold the same plan."""
    told: list[Any] = [None] * dist.get_world_size()
    mine = torch.tensor(list(digest.encode()), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in told]
    dist.all_gather(rows, mine)
    other = next((rank for rank, row in enumerate(rows) if not torch.equal(row, mine)), None)
    if other is not None:
        raise ConfigError(
            f"ranks {other} and {dist.get_rank()} have different plans. Give all of them the same file."
        )


def _multiply(parameters: list[Tensor], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def _local(gradient: Tensor) -> Tensor:
    local: Tensor = getattr(gradient, "_local_tensor", gradient)
    return local
