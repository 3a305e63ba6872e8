"""Row-wise AdaGrad with a scaled moment, for tables whose gradients name the rows that were looked up.

Paper: Zhang et al., 2D sparse parallelism (arXiv 2508.03854), on FBGEMM's row-wise AdaGrad: one moment for a
row, v += mean(g^2), w -= lr * g / (sqrt(v / c) + eps). The paper's section on the scale was not at hand: the
formula is derived. Groups that average weights build v from smaller batches, which makes it up to G times too
large, so c lies in [1, G]. c = 1 is FBGEMM's; public TorchRec and FBGEMM have neither scale nor delay.

Weight decay is FBGEMM's, of the rows that a step moves: L2 adds weight_decay * w to g, as torch's Adagrad
does, and so counts in v; decoupled, as AdamW's, takes lr * weight_decay * w off the row besides. torch decays
all rows in every step, and refuses to with sparse gradients.

Invariant: a row that was not looked up keeps its weights and its moment, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError


class RowWiseAdagrad(torch.optim.Optimizer):
    """AdaGrad with one moment for each row of a table. Gradients are sparse: no dense one is ever made."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.01,
        eps: float = 1e-8,
        moment_scale: float | Literal["groups"] = "groups",
        delay: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        """`moment_scale`: c, `groups` takes as many as there are. `delay`: divide by the moment of the last
        synchronisation, which is the same in all groups, and let new squares count from the next one on.
        `weight_decay`: of the rows that were looked up; added to the gradient, or decoupled from it."""
        if moment_scale != "groups" and not (isinstance(moment_scale, int | float) and moment_scale >= 1):
            raise ConfigError(f"moment_scale is 'groups' or a number >= 1, got {moment_scale!r}.")
        if not (lr >= 0 and eps >= 0):
            raise ConfigError(f"row-wise AdaGrad: lr and eps are >= 0, got {lr} and {eps}.")
        if not 0 <= weight_decay < float("inf"):
            raise ConfigError(f"row-wise AdaGrad: weight_decay is a number >= 0, got {weight_decay}.")
        self.groups = 1
        """How many copies of the tables there are; the tables say."""
        defaults = {"lr": lr, "eps": eps, "moment_scale": moment_scale, "delay": delay}
        decay = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, defaults | decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the rows that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, group)
        return loss

    def _move(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        if not p.grad.is_sparse:
            raise ConfigError(
                "row-wise AdaGrad steps embedding tables, but a parameter has a dense gradient. Give it "
                "tables.weights alone, and the others to another optimizer."
            )
        gradient = p.grad.coalesce()
        rows, g = gradient._indices()[0], gradient._values()
        decay, decoupled = group["weight_decay"], group["decoupled_weight_decay"]
        if decay and not decoupled:
            g = g.add(p.index_select(0, rows), alpha=decay)
        v = self.moments(p, group)["sum"]
        moment = v.index_select(0, rows).add_(g.square().mean(1))
        v.index_copy_(0, rows, moment)
        if group["delay"]:
            synced = self.state[p]["synced"].index_select(0, rows)
            moment = torch.where(synced > 0, synced, moment)
        rate = group["lr"] / ((moment / self._scale(group)).sqrt_().add_(group["eps"]))
        change = g * rate.neg_().unsqueeze(1)
        if decay and decoupled:
            change.sub_(p.index_select(0, rows), alpha=group["lr"] * decay)
        p.index_add_(0, rows, change)

    def moments(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """What is remembered of a parameter: zeros at first."""
        state: dict[str, Tensor] = self.state[p]
        for name in ("sum", "synced") if group["delay"] else ("sum",):
            if name not in state:
                state[name] = torch.zeros(p.shape[0], dtype=p.dtype)
        return state

    def _scale(self, group: dict[str, Any]) -> float:
        scale = group["moment_scale"]
        return float(self.groups if scale == "groups" else scale)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Tables are trained by SGD without memory, or by row-wise AdaGrad; others are refused.

    Averaging the weights of groups is right for updates that are linear in the gradient, and for one moment
    whose scale is known.
    """
    if isinstance(optimizer, RowWiseAdagrad):
        return
    name = type(optimizer).__name__
    if type(optimizer) is not torch.optim.SGD:
        raise ConfigError(
            f"embedding tables cannot be trained by {name}: its memory would have to be averaged over "
            "groups. Use paceline.parallel.embedding.RowWiseAdagrad, or torch.optim.SGD without momentum."
        )
    for group in optimizer.param_groups:
        for dial in ("momentum", "weight_decay", "nesterov"):
            if group[dial]:
                raise ConfigError(
                    f"embedding tables are trained by SGD without {dial}, got {group[dial]!r}: rows that are "
                    f"not looked up have no gradient. Leave {dial} out, or use RowWiseAdagrad."
                )
