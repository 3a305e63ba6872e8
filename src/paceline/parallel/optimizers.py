"""Which optimizers can step a model on a mesh: what they hold, and what they look at."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.runtime.worker.optimizer.scaling import taken_from
from paceline.store.pieces import ELEMENTWISE


def check_known(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Optimizer and model have the same parameters: others would be each worker's own."""
    named = dict(model.named_parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    known, own = {id(p) for p in held}, {id(p) for p in named.values()}
    missing = [name for name, p in named.items() if p.requires_grad and id(p) not in known]
    if missing:
        raise ConfigError(
            f"the optimizer does not have parameter {missing[0]!r} of the model. Make it of its parameters() "
            "after the model's last change."
        )
    strange = next((p for p in held if id(p) not in own), None)
    if strange is not None:
        raise ConfigError(
            f"the optimizer has a parameter of shape {tuple(strange.shape)} that is not in the model: on a "
            "mesh every worker would train its own copy, which would not be saved. Make it a parameter of "
            "one of the model's modules, or leave it out."
        )


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what may look at a whole tensor, for a model whose tensors lie in pieces on several workers."""
    if not steps_elementwise(optimizer):
        kind = type(optimizer)
        raise ConfigError(
            f"optimizer {kind.__name__} ({kind.__module__}) uses whole tensors, or may do so, but this "
            "model's tensors are split over several workers, so results would differ. Use an optimizer of "
            f"torch.optim that steps each number by itself: {', '.join(sorted(ELEMENTWISE))}."
        )


def steps_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is that of one of torch's that step every number by itself."""
    taken = inspect.unwrap(type(optimizer).step)
    return any(taken is inspect.unwrap(getattr(torch.optim, name).step) for name in ELEMENTWISE)


def refuse_scaler(optimizer: torch.optim.Optimizer) -> None:
    """A scaler skips a step by itself, which the other workers would wait for."""
    if taken_from(optimizer) is not None:
        raise ConfigError(
            "a GradScaler on a mesh: it skips steps by what one worker has seen, and the others would wait. "
            "Use bfloat16, which needs no scaler."
        )
