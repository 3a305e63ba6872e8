"""Models and steps that real runs train; tests train the same ones in plain PyTorch, to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from case_models import (
    Embedded,
    HalfFrozen,
    Heads,
    Sum,
    SumInParts,
    Tied,
    TwoTypes,
    channels_last,
    compiled,
    mlp,
    noisy,
    normed,
    wide,
)
from torch import Tensor, nn

Optimizer = torch.optim.Optimizer
Iteration = Callable[[nn.Module, Optimizer, Tensor, Tensor], Tensor]
TIGHT = 0.05


def tabular(samples: int) -> tuple[Tensor, Tensor]:
    """Six numbers and one of three classes per sample."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def images(samples: int) -> tuple[Tensor, Tensor]:
    """Small pictures of three classes."""
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(samples, 2, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    """Four of ten tokens per sample."""
    generator = torch.Generator().manual_seed(13)
    x = torch.randint(10, (samples, 4), generator=generator)
    return x, torch.randint(3, (samples,), generator=generator)


def counts(samples: int) -> tuple[Tensor, Tensor]:
    """Whole numbers, so that sums of gradients are exact."""
    generator = torch.Generator().manual_seed(14)
    x = torch.randint(-8, 9, (samples, 5), generator=generator).double()
    return x, torch.zeros(samples)


def ordinary(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Forward, backward, step, zero."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def plain_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def add_up(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach() * 0


def routed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x, y == 2), y)


def zero_first(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = routed(model, x, y)
    loss.backward()
    optimizer.step()
    return loss


def zero_between(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = routed(model, x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


def zero_kept(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = routed(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def model_zero(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = routed(model, x, y)
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss


def model_zero_kept(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = routed(model, x, y)
    loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=False)
    return loss


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """So wide a clip that it never bites, and yet touches every gradient."""
    loss = routed(model, x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def with_closure(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert isinstance(loss, Tensor)
    return loss


def accumulated(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Two backward passes per step."""
    total = torch.zeros(())
    for half_x, half_y in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.cross_entropy(model(half_x), half_y) / 2
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def rebuilt_graph(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """`create_graph` makes backward replace gradients instead of adding to them."""
    loss = F.cross_entropy(model(x), y)
    loss.backward(create_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def autocast(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def scaled(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """With a gradient scaler, as for float16; its factor is a power of two, so nothing is rounded."""
    scaler = optimizer.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=256.0))
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


def tightly_clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Every worker clips its own gradient."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), TIGHT)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def in_groups(model: nn.Module) -> Optimizer:
    """Every parameter with settings of its own."""
    groups = [
        {"params": [p], "lr": 0.01 * (i + 1), "weight_decay": 0.1 * i, "betas": (0.9, 0.99 - 0.1 * i)}
        for i, p in enumerate(model.parameters())
    ]
    return torch.optim.AdamW(groups)


def outside(model: nn.Module) -> Optimizer:
    """A trained tensor that belongs to no module stays out of the model's state."""
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """Something to train."""

    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], Optimizer] = momentum
    data: Callable[[int], tuple[Tensor, Tensor]] = tabular
    iteration: Iteration = ordinary
    dtype: torch.dtype = torch.float64

    def build(self) -> tuple[nn.Module, Optimizer]:
        """The model with the same initial weights everywhere, and its optimizer."""
        torch.manual_seed(5)
        model = self.model().to(self.dtype)
        return model, self.optimizer(model)

    def samples(self, number: int) -> tuple[Tensor, Tensor]:
        """The training data."""
        x, y = self.data(number)
        return (x.to(self.dtype) if x.is_floating_point() else x), y


def large_batch(case: Case, samples: int, rounds: Iterable[Sequence[int]]) -> dict[str, Tensor]:
    """One process in plain PyTorch, one step per round."""
    model, optimizer = case.build()
    x, y = case.samples(samples)
    for indices in rounds:
        case.iteration(model, optimizer, x[list(indices)], y[list(indices)])
    return model.state_dict()


def in_rounds(samples: int, batch: int, workers: int, epochs: int) -> list[list[int]]:
    """What each round of lockstep works on: what a loader with the batches of a round as one would give."""
    size = batch * workers
    epoch = [list(range(first, min(first + size, samples))) for first in range(0, samples, size)]
    return epochs * epoch


CASES = {
    "momentum": Case(),
    "adamw": Case(optimizer=adamw),
    "sgd": Case(optimizer=plain_sgd),
    "noisy": Case(noisy, dtype=torch.float32),
    "normed": Case(normed),
    "noisy_adamw": Case(noisy, adamw, dtype=torch.float32),
    "single": Case(dtype=torch.float32),
    "tightly_clipped": Case(iteration=tightly_clipped),
    "exact_in_parts": Case(
        SumInParts, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), counts, add_up
    ),
    "exact": Case(Sum, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), counts, add_up),
}
LARGE_BATCH = {
    "tied": Case(Tied, momentum, tokens),
    "sparse": Case(Embedded, plain_sgd, tokens),
    "frozen": Case(HalfFrozen, adamw),
    "two_types": Case(TwoTypes, momentum),
    "channels_last": Case(channels_last, momentum, images),
    "compiled": Case(compiled, momentum),
    "wide": Case(wide, momentum),
    "wide_adamw": Case(wide, adamw),
    "groups": Case(optimizer=in_groups),
    "outside": Case(optimizer=outside),
    "zero_first": Case(Heads, adamw, iteration=zero_first),
    "zero_between": Case(Heads, adamw, iteration=zero_between),
    "zero_kept": Case(Heads, adamw, iteration=zero_kept),
    "model_zero": Case(Heads, adamw, iteration=model_zero),
    "model_zero_kept": Case(Heads, adamw, iteration=model_zero_kept),
    "clipped": Case(Heads, adamw, iteration=clipped),
    "closure": Case(optimizer=adamw, iteration=with_closure),
    "accumulated": Case(iteration=accumulated),
    "scaled": Case(iteration=scaled),
    "rebuilt_graph": Case(iteration=rebuilt_graph),
}
"""What has to equal one process with the large batch in lockstep."""
ROUGH = {
    "half": Case(dtype=torch.bfloat16),
    "autocast": Case(iteration=autocast, dtype=torch.float32),
}
CASES |= LARGE_BATCH | ROUGH
