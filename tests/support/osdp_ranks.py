"""What every rank of the OSDP tests does; started by `run_ranks`."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from paceline.parallel.plans.sharding import average_replicated, clip, shard
from paceline.plan.osdp.plan import OsdpPlan

BATCH, STEPS = 6, 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 32),
        nn.Tanh(),
        nn.Linear(32, 24),
        nn.LayerNorm(24),
        nn.Linear(24, 24, bias=False),
        nn.Linear(24, 5),
    )


def data(size: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH * size, 10, generator=made), torch.randint(0, 5, (BATCH * size,), generator=made))
        for _ in range(STEPS)
    ]


def trained_alone(size: int, clip_norm: float) -> dict[str, Tensor]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in data(size):
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def trains(rank: int, size: int, request: Any) -> Any:
    """For every plan: how far its weights are from those of one process, and what ranks hold."""
    torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh("cpu", (size,))
    whole = trained_alone(size, request["clip"])
    answers = []
    for table in request["plans"]:
        plan = msgspec.convert(table, OsdpPlan)
        model = network()
        if rank:  # what a rank began with does not matter
            nn.init.zeros_(next(model.parameters()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sharded = shard(model, optimizer, plan, mesh)
        for x, y in data(size):
            mine = slice(rank * BATCH, (rank + 1) * BATCH)
            F.cross_entropy(model(x[mine]), y[mine]).backward()
            average_replicated(model)
            clip(model.parameters(), request["clip"])
            optimizer.step()
            optimizer.zero_grad()
        state = copy.copy(sharded.whole_state())
        held = sum(_local(p).numel() for p in model.parameters())
        apart = max(float((state[name] - whole[name]).abs().max()) for name in whole)
        answers.append({"names": sorted(state), "apart": apart, "held": held})
    return {"answers": answers, "names": sorted(whole)}


def _local(parameter: Tensor) -> Tensor:
    local: Tensor = getattr(parameter, "_local_tensor", parameter)
    return local
