"""A store and a few workers of it, to try corrections on: no process, no protocol."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.store.corrections.correction import GradientPart, Stride
from paceline.store.layout import Layout, describe
from paceline.store.optimizers import OptimizerSpec, describe_optimizer
from paceline.store.parameters import Gradients, ParameterStore

SHAPES = ((5, 3), (7,), (2, 2))
SIZE = 15 + 7 + 4
Settings = list[dict[str, Any]]


class Bag(nn.Module):
    """A few parameters."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ParameterList([torch.randn(shape, dtype=dtype) for shape in SHAPES])


def plain(name: str = "SGD", **settings: Any) -> tuple[Layout, OptimizerSpec, Tensor, Settings]:
    model = Bag()
    owned = list(model.parameters())
    optimizer = getattr(torch.optim, name)(owned, **{"lr": 0.1, **settings})
    layout = describe(model, owned)
    spec = describe_optimizer(optimizer, {id(p): i for i, p in enumerate(owned)})
    weights = torch.zeros(layout.weights_bytes, dtype=torch.uint8)
    for view, parameter in zip(layout.weight_views(weights), owned, strict=True):
        view.copy_(parameter.detach())
    return layout, spec, weights, [group.settings for group in spec.groups]


class Crew:
    """A store and a few workers of it, without a process or a protocol."""

    def __init__(self, correct: str, name: str = "SGD", workers: int = 3, **settings: Any) -> None:
        self.layout, spec, weights, self.settings = plain(name, **settings)
        self.spec = spec
        self.store = ParameterStore(self.layout, spec, weights)
        self.store.correct(correct)
        self.copies = {rank: weights.clone() for rank in range(workers)}

    @property
    def corrections(self) -> Any:
        return self.store.corrections

    @property
    def weights(self) -> Tensor:
        return self.flat(self.store.weights)

    def flat(self, memory: Tensor) -> Tensor:
        return torch.cat([view.flatten() for view in self.layout.weight_views(memory)]).clone()

    def vector(self, vectors: Any) -> Tensor:
        return torch.cat([view.flatten() for view in vectors.views])

    def gradients(self, values: Tensor) -> Gradients:
        made = Gradients(self.layout, torch.zeros(self.layout.segment_bytes, dtype=torch.uint8))
        for view, part in zip(made.views, values.split([view.numel() for view in made.views]), strict=True):
            view.copy_(part.view_as(view))
        return made

    def each(self, parts: list[tuple[int, Tensor, float]], stride: Stride, *released: int) -> None:
        named = [GradientPart(worker, self.gradients(values), share) for worker, values, share in parts]
        self.store.apply_each(named, self.settings, stride, [self.copies[rank] for rank in released])

    def push(self, worker: int, values: Tensor, active: int = 1) -> None:
        self.each([(worker, values, 1.0)], Stride(1 / active, 1 / active, active), worker)


def noise(seed: int) -> Tensor:
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
