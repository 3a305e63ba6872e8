"""Loops of scripts under plans, as every rank of a test runs them; started by `run_ranks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.parallel.plans.hap.pace import HapPace
from paceline.parallel.plans.planned_pace import OsdpPace, PlannedPace
from paceline.plan.hap.plan import HapPlan
from paceline.plan.osdp.plan import OsdpPlan

BATCH, SAMPLES = 2, 24


class Branches(nn.Module):
    """Layers of which a call uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = torch.tanh(getattr(self, name)(x))
        return x.square().mean()


class Straight(nn.Module):
    """A model with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.tanh(self.up(x))), y)


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 4, generator=made), torch.randn(SAMPLES, 1, generator=made))


def begun(kind: type[nn.Module], **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, **settings)


def loader(batch: int, seed: int | None = None) -> DataLoader[Any]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(data(), batch, shuffle=seed is not None, generator=generator)


def osdp(rank: int, size: int, plan: Any) -> PlannedPace:
    config = RunConfig(run="test", folder="", workers=size)
    return OsdpPace(rank, size, config, msgspec.convert(plan, OsdpPlan))


def hap(rank: int, size: int, plan: Any) -> PlannedPace:
    config = RunConfig(run="test", folder="", workers=size)
    return HapPace(rank, size, config, msgspec.convert(plan, HapPlan))


def refused(run: Callable[[], Any]) -> str:
    """What the user is told."""
    try:
        run()
    except ConfigError as error:
        return str(error)
    return ""


def apart(pace: PlannedPace, alone: nn.Module) -> float:
    """How far all weights are from those of one process."""
    state = pace.whole_state()
    return max(float((state[name] - p.detach()).abs().max()) for name, p in alone.named_parameters())


# -- parameters without a gradient ------------------------------------------------------------

USES = (
    {0: ("first",), 1: ("first",)},
    {0: ("first",), 1: ("first", "left")},
    {0: ("first", "left"), 1: ("first",)},
    {0: ("first",), 1: ("first",)},
)
"""What ranks use in every step: `right` never, `left` in some steps on one rank."""
ALIKE = ({0: ("first",), 1: ("first",)}, {0: ("first", "left"), 1: ("first", "left")}) * 2


def some_without_gradient(rank: int, size: int, request: Any) -> Any:
    """How far weights are from one process's, replicated and sharded."""
    return [_uses(rank, size, plan, uses) for plan, uses in zip(request, (USES, ALIKE), strict=True)]


def _uses(rank: int, size: int, plan: Any, uses: Any) -> float:
    alone, plain = begun(Branches)
    for (x, _), used in zip(loader(BATCH * size), uses, strict=False):
        losses = [alone(part, *used[r]) for r, part in enumerate(x.split(BATCH))]
        torch.stack(losses).mean().backward()
        plain.step()
        plain.zero_grad()
    model, optimizer = begun(Branches)
    pace = osdp(rank, size, plan)
    model, optimizer, batches = pace.prepare(model, optimizer, loader(BATCH))
    for (x, _), used in zip(batches, uses, strict=False):
        model(x, *used[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return apart(pace, alone)


def mixed_up(rank: int, size: int, plan: Any) -> Any:
    """Every rank uses another one of two sharded layers."""
    model, optimizer = begun(Branches)
    pace = osdp(rank, size, plan)
    model, optimizer, batches = pace.prepare(model, optimizer, loader(BATCH))
    model(next(iter(batches))[0], "left" if rank else "right").backward()
    return refused(optimizer.step)
