"""Loops of scripts under plans, as every rank of a test runs them; started by `run_ranks`."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

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


# -- loops of all kinds -----------------------------------------------------------------------


def loops(rank: int, size: int, request: Any) -> Any:
    """Everything that both kinds of plans have to do, or to refuse, in turn."""
    kinds = {"osdp": (osdp, BATCH), "hap": (hap, BATCH * size)}
    cases = (closure, scaler, order, figures, later, closures, several)
    answers: dict[str, Any] = {}
    for name, plan in request.items():
        kind, batch = kinds[name]
        make = partial(kind, rank, size, plan)
        answers[name] = {case.__name__: case(rank, make, batch) for case in cases}
    return answers


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    model(x, y).backward()
    optimizer.step()


def _steps(optimizer: torch.optim.Optimizer, model: nn.Module, batches: Any) -> list[float]:
    """With closures; the losses that steps return."""
    losses = []
    for x, y in batches:

        def computed(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x, y)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(computed).detach()))  # type: ignore[arg-type,union-attr]
    return losses


def closure(rank: int, make: Callable[[], PlannedPace], batch: int) -> Any:
    """How far it is from one process."""
    alone, plain = begun(Straight)
    expected = _steps(plain, alone, loader(4))
    pace = make()
    model, optimizer = begun(Straight)
    model, optimizer, batches = pace.prepare(model, optimizer, loader(batch))
    told = pace.gather(torch.tensor([_steps(optimizer, model, batches)])).mean(0).tolist()
    return max(apart(pace, alone), *(abs(a - b) for a, b in zip(told, expected, strict=True)))


def scaler(rank: int, make: Callable[[], PlannedPace], batch: int) -> list[float]:
    """Half of a batch overflows: how far it is from one process, and the scale afterwards."""
    pace, made, scale = make(), [], 0.0
    for batches in (loader(4), loader(batch)):
        model, optimizer = begun(Straight)
        made.append(model)
        given: Any = batches
        if len(made) == 2:
            model, optimizer, given = pace.prepare(model, optimizer, batches)
        scaled = torch.amp.GradScaler("cpu", init_scale=8.0)
        for place, (x, y) in enumerate(given):
            if place == 1 and (len(y) == 4 or rank):
                y[-2:] = float("inf")
            optimizer.zero_grad()
            scaled.scale(model(x, y)).backward()
            scaled.step(optimizer)
            scaled.update()
        scale = scaled.get_scale()
    return [apart(pace, made[0]), scale]


def order(rank: int, make: Callable[[], PlannedPace], batch: int) -> str:
    """A loader whose order is another one on every rank."""
    return refused(lambda: make().prepare(*begun(Straight), loader(batch, seed=5 + rank)))


def figures(rank: int, make: Callable[[], PlannedPace], batch: int) -> Any:
    """The rate that a scheduler has set that looks at the figures, and what a rank was told."""
    pace = make()
    model, optimizer = begun(Straight)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    model, optimizer, _ = pace.prepare(model, optimizer, loader(batch))
    for _ in range(2):
        found = pace.evaluate(lambda: {"loss": 2.0 + rank})
        if found:
            plateau.step(found["loss"])
    return [found, optimizer.param_groups[0]["lr"]]


def later(rank: int, make: Callable[[], PlannedPace], batch: int) -> list[float]:
    """A layer that is unfrozen, or given to the optimizer, after a while: how far it is from one process."""
    return [_later(make, batch, by) for by in (_unfreeze, _add)]


def _later(make: Callable[[], PlannedPace], batch: int, by: Callable[..., None]) -> float:
    pace, made = make(), []
    for batches in (loader(4), loader(batch)):
        model, optimizer = begun(Straight)
        if by is _unfreeze:
            model.get_submodule("up").requires_grad_(False)
        else:
            del optimizer.param_groups[0]["params"][:2]
        made.append(model)
        given: Any = batches
        if len(made) == 2:
            model, optimizer, given = pace.prepare(model, optimizer, batches)
        for place, (x, y) in enumerate(given):
            if place == 2:
                by(model, optimizer)
            _step(model, optimizer, x, y)
    return apart(pace, made[0])


def _unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.get_submodule("up").requires_grad_()


def _add(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(model.get_submodule("up").parameters())})


def strangers(rank: int, size: int, plan: Any) -> list[str]:
    """Parameters that were a sharded model's before prepare, and one that never was a model's."""
    model = Straight()
    before = list(model.up.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.down.parameters())
    prepared, optimizer, batches = osdp(rank, size, plan).prepare(model, optimizer, loader(BATCH))
    optimizer.add_param_group({"params": before})
    told = refused(lambda: _step(prepared, optimizer, *next(iter(batches))))
    model = Straight()
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(1))])
    return [told, refused(lambda: osdp(rank, size, plan).prepare(model, optimizer, loader(BATCH)))]


def closures(rank: int, make: Callable[[], PlannedPace], batch: int) -> str:
    """An optimizer that computes the loss several times."""
    model = Straight()
    return refused(lambda: make().prepare(model, torch.optim.LBFGS(model.parameters()), loader(batch)))


def several(rank: int, make: Callable[[], PlannedPace], batch: int) -> str:
    """Two optimizers."""
    model = Straight()
    two = [torch.optim.AdamW(part.parameters()) for part in (model.up, model.down)]
    return refused(lambda: make().prepare(model, *two, loader(batch)))


# -- under HAP --------------------------------------------------------------------------------


def noise(rank: int, size: int, plan: Any) -> Any:
    """Noise that the script adds: how far it is from one process, and other numbers that are drawn."""
    alone, plain = begun(Straight)
    torch.manual_seed(100)
    for x, y in loader(BATCH * size):
        _step(alone, plain, x + torch.randn_like(x), y)
    pace = hap(rank, size, plan)
    model, optimizer = begun(Straight)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)
    model, optimizer, batches = pace.prepare(model, optimizer, loader(BATCH * size))
    for x, y in batches:
        _step(model, optimizer, x + torch.randn_like(x), y)
    return {"apart": apart(pace, alone), "drawn": [random.random(), np.random.rand()]}


def osdp_numbers(rank: int, size: int, plan: Any) -> Any:
    """What is drawn after prepare, and what a script is told that splits the data by rank."""
    pace = osdp(rank, size, plan)
    random.seed(100)
    np.random.seed(100)
    pace.prepare(*begun(Straight), loader(BATCH))
    drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
    own = DataLoader(Subset(data(), range(rank, SAMPLES, size)), BATCH)
    return {"drawn": drawn, "split": refused(lambda: osdp(rank, size, plan).prepare(*begun(Straight), own))}


def unused_loader(rank: int, size: int, plan: Any) -> list[str]:
    """What a script hears that trains with its own loader."""
    said: list[str] = []
    pace, mine = osdp(rank, size, plan), loader(BATCH)
    pace._warn = said.append  # type: ignore[method-assign]
    model, optimizer, _ = pace.prepare(*begun(Straight), mine)
    for x, y in mine:
        _step(model, optimizer, x, y)
    return said


def other_noise(rank: int, size: int, plan: Any) -> str:
    """One worker draws a number more than the others, between its steps."""
    pace = hap(rank, size, plan)
    model, optimizer, batches = pace.prepare(*begun(Straight), loader(BATCH * size))
    (x, y), (again, _), *_ = batches
    _step(model, optimizer, x + torch.randn_like(x), y)
    if pace.lead:
        torch.randn(1)
    return refused(lambda: _step(model, optimizer, again + torch.randn_like(x), y))


def without_gradient(rank: int, size: int, plan: Any) -> float:
    """A layer whose gradients the script removes, to train the other one first."""
    alone, plain = begun(Straight)
    pace = hap(rank, size, plan)
    model, optimizer = begun(Straight)
    model, optimizer, batches = pace.prepare(model, optimizer, loader(BATCH * size))
    for of, steps, given in ((alone, plain, loader(BATCH * size)), (model, optimizer, batches)):
        for x, y in given:
            of(x, y).backward()
            of.get_submodule("up").zero_grad()
            steps.step()
            steps.zero_grad()
    return apart(pace, alone)
