"""A model as a row of blocks: what each hands on, what it costs, and which of them belong together."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.parallel.pieces import in_order
from paceline.runtime.checkpoints.random_state import RandomState

REPEATS = 3
"""How often a block is measured; the fastest counts."""


class Cost(NamedTuple):
    """What one block costs for one batch."""

    forward_s: float
    backward_s: float
    weight_bytes: int
    input_bytes: int
    output_bytes: int


def as_blocks(model: nn.Module | Sequence[nn.Module]) -> nn.Sequential:
    """An `nn.Sequential`, or a list of blocks, as one."""
    if isinstance(model, nn.Sequential):
        return model
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"a pipeline needs a sequence of blocks, got a {type(model).__name__}. Give an nn.Sequential, "
            "or a list of blocks that each take what the one before returns."
        )
    return nn.Sequential(*model)


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def check_only_blocks(blocks: nn.Sequential) -> None:
    """Refuse what an nn.Sequential does besides its blocks: no stage would."""
    held = [*blocks.named_parameters(recurse=False), *blocks.named_buffers(recurse=False)]
    own = [f"a tensor {name!r} of its own" for name, _ in held]
    if type(blocks).forward is not nn.Sequential.forward or "forward" in vars(blocks):
        own.append("a forward of its own")
    if any(getattr(blocks, hooks) for hooks in HOOKS):
        own.append("hooks")
    if own:
        raise ConfigError(
            f"the model ({type(blocks).__name__}) has {own[0]}, and a pipeline computes the blocks only. "
            "Put everything else that forward does into a block."
        )


class Row(nn.Sequential):
    """The blocks of one stage, under the names they have in the whole; each is held to return one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """One after another."""
        for name, block in in_order(self):
            x = one_tensor(block(x), name, block)
        return x

    def name_of(self, parameter: Tensor) -> str:
        """The name of one of its parameters."""
        return next(name for name, p in self.named_parameters() if p is parameter)


def stage_of(blocks: nn.Sequential, cuts: Sequence[int], stage: int) -> Row:
    """The blocks of one stage."""
    bounds = (0, *cuts, len(blocks))
    named = in_order(blocks)[bounds[stage] : bounds[stage + 1]]
    return Row(OrderedDict(named))


def check_apart(blocks: nn.Sequential, cuts: Sequence[int]) -> None:
    """Refuse a parameter that several stages would train, each its own way."""
    bounds = (0, *cuts, len(blocks))
    seen: dict[int, tuple[int, str]] = {}
    for stage, (start, end) in enumerate(pairwise(bounds)):
        for name, block in in_order(blocks)[start:end]:
            for own, p in block.named_parameters():
                first = seen.setdefault(id(p), (stage, f"{name}.{own}"))
                if first[0] != stage:
                    raise ConfigError(
                        f"{first[1]} and {name}.{own} are one parameter, but lie on stages {first[0]} and "
                        f"{stage}. Cut the model so that both are on one stage, or untie them."
                    )


def one_tensor(output: Any, name: str, block: nn.Module) -> Tensor:
    """What a block returned, if that is one tensor."""
    if isinstance(output, Tensor):
        return output
    raise ConfigError(
        f"block {name!r} ({type(block).__name__}) returned a {type(output).__name__}; it must return one "
        "tensor. Let it return one, or merge it with the next block."
    )


def measure(blocks: nn.Sequential, x: Tensor) -> list[Cost]:
    """Forward and backward of every block, on this batch. Buffers and random numbers stay as they were."""
    kept, random = {n: b.clone() for n, b in blocks.named_buffers()}, RandomState.now()
    costs: list[Cost] = []
    for name, block in in_order(blocks):
        cost, x = _measured(name, block, x, first=not costs)
        costs.append(cost)
    with torch.no_grad():
        for name, buffer in blocks.named_buffers():
            buffer.copy_(kept[name])
    for p in blocks.parameters():
        p.grad = None
    random.restore()
    return costs


def _measured(name: str, block: nn.Module, x: Tensor, first: bool) -> tuple[Cost, Tensor]:
    forward = backward = float("inf")
    for _ in range(REPEATS):
        given = x.detach().requires_grad_(not first and x.is_floating_point())
        began = time.perf_counter()
        out = one_tensor(block(given), name, block)
        between = time.perf_counter()
        if out.requires_grad:
            torch.autograd.backward(out, torch.ones_like(out))
        forward = min(forward, between - began)
        backward = min(backward, time.perf_counter() - between)
    weights = sum(p.numel() * p.element_size() for p in block.parameters())
    return Cost(forward, backward, weights, _bytes(x), _bytes(out)), out.detach()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
