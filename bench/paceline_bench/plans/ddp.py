"""The other side of the HAP benchmark: torch's DistributedDataParallel, even batches, on the same emulated
devices."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.parallel.plans.hap.emulated_device import EmulatedDevice
from paceline_bench.plans.model import Letters, letters_data, letters_loss
from paceline_bench.wrapped.ddp import wrapped

TASK = f"{__name__}:on_rank"


class OnDevice(nn.Module):
    """A block that takes an emulated device's time for its part of the batch."""

    def __init__(self, block: nn.Module, device: EmulatedDevice, work: float) -> None:
        super().__init__()
        self.block, self.device, self.work = block, device, work

    def forward(self, x: Tensor) -> Tensor:
        """The block's."""
        return self.device.spend(self.work, [x], lambda inputs: self.block(inputs[0]))


def on_rank(rank: int, size: int, request: Any) -> list[float]:
    """Seconds of every step, without the first ones. All work counts as the blocks', in equal parts."""
    config = msgspec.convert(request["config"], RunConfig, str_keys=True)
    width, layers, batch, steps = request["width"], request["layers"], request["batch"], request["steps"]
    torch.manual_seed(0)
    model = Letters(width, layers, 4)
    device = EmulatedDevice(config, rank, 1.0)
    model.blocks = nn.Sequential(*(OnDevice(block, device, 1 / layers / size) for block in model.blocks))
    ddp = wrapped(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    own = batch // size
    x, y = (tensor[rank * own : (rank + 1) * own] for tensor in letters_data(batch).tensors)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        letters_loss(ddp, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    return times[steps // 4 :]
