"""`paceline.run`: a training loop made from a few functions, for users without a training script.

A recipe is a Python file that defines model, data, loss and optimizer as functions and passes them to
`paceline.run`. It runs alone, under every engine and in exact simulation like any other script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.runtime.worker.pace import Metrics, Pace


def run(
    join: Callable[..., Pace],
    *,
    model: Callable[[], nn.Module],
    data: Callable[[], DataLoader[Any]],
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    epochs: int,
    evaluate: Callable[[nn.Module], Metrics] | None = None,
    protocol: str | None = None,
    **settings: Any,
) -> nn.Module:
    """Train with what the functions return, and return the model. `protocol` and settings are passed to
    `join`, which is `paceline.join`."""
    pace = join(protocol, **settings)
    network: nn.Module = model()
    steps = optimizer(network.parameters())
    _, _, loader = pace.prepare(network, steps, data())
    for epoch in pace.epochs(epochs):
        for batch in loader:
            value = loss(network, batch)
            value.backward()  # type: ignore[no-untyped-call]
            steps.step()
            steps.zero_grad()
            pace.report(loss=value.item())
        figures = pace.evaluate(evaluate) if evaluate is not None else None
        if figures:
            words = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
            pace.print(f"epoch {epoch + 1}: {words}")
    return network
