"""What every rank of the OSDP tests does; started by `run_ranks`."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.parallel.plans.clipping import stand_in_for_clipping
from paceline.parallel.plans.planned_pace import OsdpPace
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


def tied() -> nn.Module:
    """Two layers that share their weights, and one beside them."""
    torch.manual_seed(0)
    first, second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Linear(10, 5))


KINDS = {"plain": network, "tied": tied}


def data(size: int) -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    samples = STEPS * BATCH * size
    return TensorDataset(
        torch.randn(samples, 10, generator=made), torch.randint(0, 5, (samples,), generator=made)
    )


def trained_alone(kind: str, size: int, clip_norm: float) -> dict[str, Tensor]:
    model = KINDS[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in DataLoader(data(size), batch_size=BATCH * size):
        _step(model, optimizer, x, y, clip_norm)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, clip_norm: float) -> None:
    """As scripts have it, with torch's own clipping."""
    F.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()


def trains(rank: int, size: int, request: Any) -> Any:
    """For every plan: how far its weights are from those of one process, and what ranks hold."""
    torch.use_deterministic_algorithms(True)
    whole = {kind: trained_alone(kind, size, request["clip"]) for kind in KINDS}
    paces: list[OsdpPace] = []
    stand_in_for_clipping(paces)
    answers = []
    for kind, table in request["plans"]:
        model = KINDS[kind]()
        if rank:  # what a rank began with does not matter
            nn.init.zeros_(next(model.parameters()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        config = RunConfig(run="test", folder="", workers=size)
        pace = OsdpPace(rank, size, config, msgspec.convert(table, OsdpPlan))
        paces[:] = [pace]
        model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data(size), batch_size=BATCH))
        for x, y in loader:
            _step(model, optimizer, x, y, request["clip"])
        state = pace.whole_state()
        held = sum(_local(p).numel() for p in model.parameters())
        apart = max(float((state[name] - whole[kind][name]).abs().max()) for name in whole[kind])
        answers.append({"names": sorted(state), "apart": apart, "held": held})
    gathered = pace.gather(torch.tensor([float(rank)])).tolist()
    try:
        pace.leave()
        left = ""
    except ConfigError as error:
        left = str(error)
    names = {kind: sorted(whole[kind]) for kind in KINDS}
    return {"answers": answers, "names": names, "gathered": gathered, "left": left}


def _local(parameter: Tensor) -> Tensor:
    local: Tensor = getattr(parameter, "_local_tensor", parameter)
    return local
