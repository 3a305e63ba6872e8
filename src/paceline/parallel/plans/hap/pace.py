"""A script under a HAP plan: every rank draws the same batch, computes its part of it, and sees the whole
output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.config import RunConfig
from paceline.decoding import decode_message
from paceline.errors import ConfigError
from paceline.parallel.mesh import gather_bytes
from paceline.parallel.plans.hap.emulated_device import EmulatedDevice
from paceline.parallel.plans.hap.program import HapProgram
from paceline.parallel.plans.planned_pace import PlannedPace
from paceline.parallel.plans.shared_loader import SharedLoader
from paceline.plan.hap.plan import HapPlan
from paceline.plan.hap.trace import by_position, trace
from paceline.runtime.checkpoints.random_state import RandomState
from paceline.runtime.worker.pace import Metrics

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD")


class HapPace(PlannedPace):
    """One of several unequal workers that compute one batch together."""

    _own_batches = False

    def __init__(self, rank: int, size: int, config: RunConfig, plan: HapPlan) -> None:
        super().__init__(rank, size, config)
        self._hap = plan
        self._program: HapProgram | None = None

    def _place(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]
    ) -> SharedLoader:
        if loader.batch_size != self._hap.batch:
            raise ConfigError(
                f"the plan is for a batch of {self._hap.batch}, the script's loader has {loader.batch_size}. "
                "Give the script that batch size, or plan again."
            )
        kind = type(optimizer).__name__
        if kind not in ELEMENTWISE or optimizer.state:
            raise ConfigError(
                f"HAP cuts parameters into pieces, and {kind} does not work element by element, or has "
                f"stepped before. Use one of {', '.join(ELEMENTWISE)}, fresh."
            )
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, 0)
        same_random_numbers(self.size)
        self._forward = model.forward
        model.forward = self._first
        return SharedLoader(loader, self._hap.batch, 0, 1, self._config.seed)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """The first call shows the shapes that a program needs; from then on the program is the model."""
        assert self._model is not None
        self._model.forward = self._forward
        traced = trace(self._model, by_position(self._forward, args, kwargs))
        config, work = self._config, sum(node.flops for node in traced.graph.nodes)
        device = EmulatedDevice(config, self.rank, work) if config.emulated is not None else None
        self._program = HapProgram(self._model, traced, self._hap, config.seed, device)
        self._model.forward = self._program
        return self._program(*args, **kwargs)

    def _average(self) -> None:
        assert self._program is not None
        self._program.add_up()

    def _norm(self, parameters: list[Tensor]) -> float:
        assert self._program is not None
        return self._program.norm(parameters)

    def evaluate(self, fn: Callable[..., Metrics]) -> Mapping[str, float] | None:
        """With the whole weights and the model's own forward: a program is for batches of one shape."""
        if self._program is None:
            return super().evaluate(fn)
        assert self._model is not None
        parameters = self._program.parameters
        pieces = {name: p.data for name, p in parameters.items()}
        for name, whole in self._program.whole(pieces).items():
            parameters[name].data = whole
        self._model.forward = self._forward
        try:
            return super().evaluate(fn)
        finally:
            self._model.forward = self._program
            for name, piece in pieces.items():
                parameters[name].data = piece

    def whole_state(self) -> dict[str, Tensor]:
        assert self._model is not None
        buffers = {
            n: b.detach().clone() for n, b in self._model.named_buffers() if n in self._model.state_dict()
        }
        if self._program is None:
            return {n: p.detach().clone() for n, p in self._model.named_parameters()} | buffers
        return self._program.whole({n: p.data for n, p in self._program.parameters.items()}) | buffers


def same_random_numbers(size: int) -> None:
    """From here on all ranks draw what rank 0 draws: what a script adds to a batch is the same for all."""
    told = gather_bytes(msgspec.msgpack.encode(RandomState.now()), size)
    decode_message(told[0], kind=RandomState).restore()
