"""FSDP2 over gloo: parameters, gradients and the optimizer's state in shards, one group for the small model.

The device computes between the all-gather of weights and the reduce-scatter of gradients, so neither is
hidden behind it: there is one group, and nothing to compute before its weights are there. The backward pass
proper (a few milliseconds) comes after the emulated device's time, because gradients leave as soon as it has
them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from paceline_bench.cluster.other import run
from paceline_bench.rivals.workers.group import GroupPace

NAME = "fsdp2"


class FSDPPace(GroupPace):
    """The model sharded, and an optimizer made anew over its shards."""

    name = NAME

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], scheduler: Any) -> Any:
        """Shard the model; `module` is a whole one, for copies."""
        self.module = copy.deepcopy(model)
        # all weights are needed again at once in the backward pass
        fully_shard(model, mesh=init_device_mesh("cpu", (self.size,)), reshard_after_forward=False)
        self._sharded = model
        self.optimizer = type(optimizer)(model.parameters(), **_usual(optimizer))
        self.scheduler = LambdaLR(self.optimizer, scheduler.lr_lambdas)
        first = next(iter(model.children()))
        first.register_forward_pre_hook(lambda *_: self.emulation.begin())
        model.register_full_backward_pre_hook(lambda *_: self.computed())
        return model, self.optimizer, self.deal(loader).silent, self.scheduler

    def evaluate(self, fn: Callable[[nn.Module], dict[str, float]]) -> None:
        """All give their shards; rank 0 has the whole."""
        self.module.load_state_dict({name: _whole(value) for name, value in self._weights.items()})
        super().evaluate(fn)

    def state(self) -> dict[str, Tensor]:
        """Whole tensors, from everybody's shards."""
        self.module.load_state_dict({name: _whole(value) for name, value in self._weights.items()})
        found = super().state()
        return {name: _whole(value) for name, value in found.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Everybody takes its shards."""
        for number, (name, value) in enumerate(self._sharded.named_parameters()):
            assert isinstance(value, DTensor)
            with torch.no_grad():
                value.copy_(distribute_tensor(state[f"model.{name}"], value.device_mesh, value.placements))
            momentum = state.get(f"state.{number}.momentum_buffer")
            if momentum is not None:
                shard = distribute_tensor(momentum, value.device_mesh, value.placements)
                self.optimizer.state[value]["momentum_buffer"] = shard

    @property
    def _weights(self) -> dict[str, Tensor]:
        return self._sharded.state_dict()


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _usual(optimizer: Any) -> dict[str, Any]:
    """The settings with which an optimizer was made."""
    return {name: value for name, value in optimizer.defaults.items() if name in ("lr", "momentum")}


if __name__ == "__main__":
    run(FSDPPace, NAME)
