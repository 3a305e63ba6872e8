"""What a run of real peers should come to: the same run in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from e2e.scripts.cases import CASES, in_rounds
from paceline.protocols.settings import make_peer
from support.peers import Crew
from support.runs import Run

SAMPLES, BATCH, EPOCHS = 48, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)


def driven(protocol: str, settings: dict[str, Any], workers: int, compress: str = "none") -> Tensor:
    """The gradients of the case `momentum`, batches dealt in turn, the mean in the end."""
    case = CASES["momentum"]
    model, _ = case.build()
    x, y = case.samples(SAMPLES)
    rounds = in_rounds(SAMPLES, BATCH, 1, EPOCHS)

    def gradient(rank: int, iteration: int, at: Tensor) -> Tensor:
        vector_to_parameters(at, model.parameters())
        model.zero_grad()
        indices = rounds[iteration * workers + rank]
        torch.nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        return parameters_to_vector([p.grad for p in model.parameters()])  # type: ignore[misc]

    start = parameters_to_vector(model.parameters()).detach()
    crew = Crew(
        make_peer(protocol, settings),
        workers,
        gradient,
        initial=lambda rank: start,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
        compress=compress,
        tensors=[p.numel() for p in model.parameters()],
    )
    crew.run(len(rounds) // workers).settle()
    return torch.stack(crew.models()).mean(0)


def vector_of(run: Run) -> Tensor:
    """The parameters that a run of `momentum` has saved, one after another."""
    model, _ = CASES["momentum"].build()
    model.load_state_dict(run.weights, strict=True)
    return parameters_to_vector(model.parameters()).detach()
