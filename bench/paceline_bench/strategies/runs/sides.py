"""How workers are kept in step: Paceline's own pace, plain PyTorch, DistributedDataParallel, FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

from paceline_bench.strategies.runs.models import parameter_bytes
from paceline_bench.strategies.runs.request import StrategyRequest
from paceline_bench.wrapped.ddp import wrapped

WEIGHTS = "weights.safetensors"


class OurSide:
    """A prepared loop."""

    def __init__(self, pace: Any) -> None:
        self._pace = pace
        self.rank, self.size = pace.rank, pace.size

    def place(self, model: nn.Module) -> nn.Module:
        """As it is."""
        self._module = model
        return model

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> Any:
        """By the pace."""
        return self._pace.prepare(model, optimizer, loader)

    def finish(self, folder: Path) -> None:
        """The run saves the weights when all are gone; a lone worker has no store that would."""
        self._pace.depart()
        if self.size == 1:
            save_file(dict(self._module.state_dict()), folder / WEIGHTS)


class SingleSide:
    """PyTorch, and nobody else."""

    rank, size = 0, 1

    def __init__(self, request: StrategyRequest) -> None:
        self._buckets = request.ddp_buckets

    def place(self, model: nn.Module) -> nn.Module:
        """As it is."""
        self._module = model
        return model

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> Any:
        """As they are."""
        return model, optimizer, loader

    def finish(self, folder: Path) -> None:
        """Save."""
        save_file(dict(self._module.state_dict()), folder / WEIGHTS)


class DDPSide(SingleSide):
    """Replicas whose gradients are averaged while backward runs; the process group is there.

    A bucket of gradients leaves when it is full. All gradients of a small model are one bucket by default,
    which leaves when backward is over; cut into several, the first leave sooner."""

    def __init__(self, request: StrategyRequest) -> None:
        super().__init__(request)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def place(self, model: nn.Module) -> nn.Module:
        """Wrapped."""
        self._module = model
        cap_mib = None if self._buckets is None else parameter_bytes(model) / self._buckets / 2**20
        return wrapped(model, cap_mib)

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> Any:
        """A global batch is dealt out sample by sample."""
        dealt: DistributedSampler[Any] = DistributedSampler(
            loader.dataset, self.size, self.rank, shuffle=False, drop_last=True
        )
        own = DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=dealt, drop_last=True)
        return model, optimizer, own

    def finish(self, folder: Path) -> None:
        """Rank 0 saves what all ranks bring together."""
        whole = {name: _whole(value) for name, value in self._module.state_dict().items()}
        if self.rank == 0:
            save_file(whole, folder / WEIGHTS)
        dist.barrier()
        dist.destroy_process_group()


class FSDPSide(DDPSide):
    """Shards of parameters, gradients and state: one unit after the other, then what is left.

    On the CPU it has no streams, and calls collectives that return when they are done: nothing travels while
    it computes."""

    def place(self, model: nn.Module) -> nn.Module:
        """Sharded in place."""
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (self.size,))
        for unit in model.children():
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._module = model
        return model


def _whole(value: Tensor) -> Tensor:
    full = getattr(value, "full_tensor", None)
    made: Tensor = value if full is None else full()
    return made.detach().clone()


TORCH: dict[str, type[SingleSide]] = {"single": SingleSide, "ddp": DDPSide, "fsdp": FSDPSide}
"""Sides that Paceline has no part in."""
