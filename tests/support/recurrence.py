"""What a stale pipeline computes, written out as a recurrence over batches: no queue, no iteration, no turn.

    expected = recurrence(stages, batches, RULES["fdg"](3), rate=lambda batch: 0.1, momentum=0.9)

Stage k of K has made floor(n / e) updates when it has back-propagated n batches, e of them for one update.
With a staleness of m_k it has back-propagated i - m_k batches when it forwards batch i; one more where every
iteration does its backward first. That is all that a schedule says about weights: the tests of the engine's
queues and of real workers compare with it. Used by the tests of pipelines, in one process and in runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """A pipeline as its paper describes it."""

    staleness: tuple[int, ...]
    """m_k of every stage: batches between its forward and its backward of one."""
    stashed: bool
    """Whether a batch is back-propagated at the weights it was forwarded at, or at those of now."""
    backward_first: bool = False
    every: int = 1
    shrink: float = 1.0
    predict: bool = False

    def done(self, stage: int, batch: int) -> int:
        """How many batches a stage has back-propagated when it forwards this one."""
        m = self.staleness[stage]
        return max(0, batch - m + (self.backward_first and m > 0))

    def ahead(self, stage: int) -> float:
        """Updates between a batch's forward and its backward."""
        m = self.staleness[stage]
        return (m - (self.backward_first and m > 0)) / self.every if self.predict else 0.0


def hops(stages: int, each: int) -> tuple[int, ...]:
    """The same delay at every boundary, there and back together."""
    return tuple(each * (stages - 1 - stage) for stage in range(stages))


RULES: dict[str, Callable[[int], Rule]] = {
    "bp": lambda stages: Rule(hops(stages, 0), stashed=False),
    "fr": lambda stages: Rule(hops(stages, 1), stashed=False),
    "ddg": lambda stages: Rule(hops(stages, 1), stashed=True),
    "layerwise": lambda stages: Rule(hops(stages, 2), stashed=False),
    "fdg": lambda stages: Rule(hops(stages, 2), stashed=True, backward_first=True),
    "adl": lambda stages: Rule(hops(stages, 2), stashed=True, backward_first=True, every=2),
}
"""The published pipelines with their defaults, from the papers' tables and not from the code."""


def rule_of(name: str, stages: int, **changed: object) -> Rule:
    """A published pipeline, with other settings."""
    return replace(RULES[name](stages), **changed)  # type: ignore[arg-type]


def recurrence(
    stages: Sequence[nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    rule: Rule,
    rate: Callable[[int], float],
    momentum: float,
) -> list[Weights]:
    """The weights of every stage after all batches; SGD, and cross entropy at the end.

    `rate`: of an update, by the number of its first batch.
    """
    w = [[_weights(stage)] for stage in stages]
    v = [[{name: torch.zeros_like(p) for name, p in each[0].items()}] for each in w]
    gathered: list[list[Weights]] = [[] for _ in stages]
    for i, (x, y) in enumerate(batches):
        forwarded = [_forwarded_at(rule, k, i, w[k], v[k], rate) for k in range(len(stages))]
        inputs = [x]
        for stage, at in zip(stages, forwarded, strict=True):
            inputs.append(functional_call(stage, at, (inputs[-1],)).detach())
        gradient = _loss_gradient(inputs[-1], y)
        for k in reversed(range(len(stages))):
            at = forwarded[k] if rule.stashed else w[k][-1]
            own, gradient = _backward(stages[k], at, inputs[k], gradient)
            gradient = gradient * rule.shrink
            gathered[k].append(own)
            if len(gathered[k]) == rule.every or i + 1 == len(batches):
                first = i + 1 - len(gathered[k])
                _step(w[k], v[k], gathered[k], rate(first), momentum)
                gathered[k] = []
    return [each[-1] for each in w]


def _weights(stage: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in stage.named_parameters()}


def _forwarded_at(
    rule: Rule, k: int, i: int, w: list[Weights], v: list[Weights], rate: Callable[[int], float]
) -> Weights:
    """w - lr·s·v, s the updates until the backward; s = 0 unless momentum is followed."""
    updates = rule.done(k, i) // rule.every
    s, lr = rule.ahead(k), rate(updates * rule.every)
    return {name: p - lr * s * v[updates][name] for name, p in w[updates].items()}


def _loss_gradient(out: Tensor, y: Tensor) -> Tensor:
    out = out.detach().requires_grad_()
    F.cross_entropy(out, y).backward()
    assert out.grad is not None
    return out.grad


def _backward(stage: nn.Module, at: Weights, x: Tensor, gradient: Tensor) -> tuple[Weights, Tensor]:
    """Of a stage's weights and of its input."""
    at, x = {name: p.clone().requires_grad_() for name, p in at.items()}, x.clone().requires_grad_()
    functional_call(stage, at, (x,)).backward(gradient)
    assert x.grad is not None
    return {name: p.grad for name, p in at.items() if p.grad is not None}, x.grad


def _step(w: list[Weights], v: list[Weights], gathered: list[Weights], lr: float, momentum: float) -> None:
    mean = {name: sum(each[name] for each in gathered) / len(gathered) for name in w[-1]}
    v.append({name: momentum * v[-1][name] + g for name, g in mean.items()})
    w.append({name: p - lr * v[-1][name] for name, p in w[-1].items()})


def cut(model: nn.Sequential, cuts: Sequence[int]) -> list[nn.Sequential]:
    """The blocks of every stage."""
    return [model[begin:end] for begin, end in pairwise((0, *cuts, len(model)))]


def whole(model: nn.Sequential, cuts: Sequence[int], trained: Sequence[Weights]) -> Weights:
    """The stages' weights under the names of the model."""
    own = {id(p): name for name, p in model.named_parameters()}
    named = zip(cut(model, cuts), trained, strict=True)
    return {own[id(p)]: weights[name] for stage, weights in named for name, p in stage.named_parameters()}
