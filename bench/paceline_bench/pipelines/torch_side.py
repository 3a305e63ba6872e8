"""The other side of the benchmark of pipelines: torch.distributed.pipelining on the same blocks.

A process is one stage. A block's forward sleeps for its micro-batch's share of a unit of time, its backward
for twice as long, as on the emulated devices of the other side.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.decoding import decode_json
from paceline_bench.pipelines.script import BATCH, STAGES, WIDTH, blocks, loss

SCHEDULES = ("gpipe", "1f1b")


class _Sleeps(torch.autograd.Function):
    """Does nothing, for as long as a device would compute."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * context.seconds)
        return gradients[0], None


class EmulatedBlock(nn.Module):
    """A block on an emulated device."""

    def __init__(self, block: nn.Module, seconds: float) -> None:
        super().__init__()
        self.block, self.seconds = block, seconds

    def forward(self, x: Tensor) -> Tensor:
        """The block's, and the time it takes."""
        out: Tensor = _Sleeps.apply(self.block(x), self.seconds)  # type: ignore[no-untyped-call]
        return out


class StageTask(msgspec.Struct, frozen=True):
    """What all stages are told."""

    meeting: str
    """The file through which they find each other."""
    cells: list[tuple[str, int]]
    """Schedules, and their numbers of micro-batches."""
    batches: int
    unit_s: float


def timed(name: str, micro: int, task: StageTask, stage: int) -> list[float]:
    """When this stage was done with each batch of a schedule."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # takes seconds

    device = EmulatedBlock(blocks()[stage], task.unit_s / micro)
    piece = torch.zeros(BATCH // micro, WIDTH)
    placed = PipelineStage(device, stage, STAGES, torch.device("cpu"), input_args=(piece,))
    kind = ScheduleGPipe if name == "gpipe" else Schedule1F1B
    schedule = kind(placed, micro, loss_fn=loss)
    optimizer = torch.optim.SGD(device.parameters(), lr=0.01)
    x = torch.randn(BATCH, WIDTH)
    ends = []
    for _ in range(task.batches):
        if stage == 0:
            schedule.step(x)
        elif stage == STAGES - 1:
            schedule.step(target=x)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.monotonic())
    return ends


def main() -> None:
    """One stage, over a file as the meeting place; the first one says when each batch was done."""
    task, stage = decode_json(sys.argv[1], kind=StageTask), int(sys.argv[2])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(task.meeting, STAGES)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=stage, world_size=STAGES)
    found = []
    for name, micro in task.cells:
        found.append(timed(name, micro, task, stage))
        dist.barrier()
    if stage == 0:
        print(msgspec.json.encode(found).decode(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
