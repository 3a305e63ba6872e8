"""How one rank carries out the operations of a HAP program, each on the parts of tensors that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paceline.errors import RunError
from paceline.parallel.plans.hap.uneven import UnevenAllReduce
from paceline.plan.hap.graph import Node
from paceline.plan.hap.in_place import changes
from paceline.plan.hap.operations import Seen, picks
from paceline.plan.hap.samples import uses_batch
from paceline.plan.hap.trace import Traced

MAY_REFUSE = ("conv", "pool", "attention", "samples")
"""Operations that torch refuses to carry out on an empty slice."""
RANDOM = ("dropout", "piece", "samples")
LOSSES: dict[type[nn.Module], Any] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.MSELoss: F.mse_loss,
}


class HapComputing:
    """Operations of one model on this rank. `shape`: of a result here, given how it is held."""

    def __init__(
        self,
        model: nn.Module,
        traced: Traced,
        nodes: dict[str, Node],
        shape: Callable[..., list[int]],
        seed: int,
    ) -> None:
        self.model, self.traced, self.nodes, self.local_shape, self.seed = model, traced, nodes, shape, seed
        self.places = {name: place for place, name in enumerate(nodes)}
        self.steps = 0

    def carry_out(self, node: Node, values: list[Tensor], after: str) -> Tensor:
        """One operation."""
        seen: Seen = self.traced.seen[node.name]
        assert seen.node is not None
        part: Any = self.model.get_submodule(str(seen.node.target)) if seen.node.op == "call_module" else None
        if node.op in MAY_REFUSE and not all(value.numel() for value in values):
            return _nothing(self.local_shape(node, after), values)
        if (with_weights := _WITH_WEIGHTS.get(node.op)) is not None:
            made: Tensor = with_weights(node, part, values)
            return made
        if node.op == "batch_norm":
            return _batch_norm(part, values, after != "I")
        if node.op == "reshape":
            return values[0].reshape(self.local_shape(node, after))
        if node.op == "loss":
            return self._loss(node, part, seen.node, values, after == "R")
        if node.op == "mean":
            count: int = prod(self.nodes[node.inputs[0]].shape[d] for d in node.attrs["dims"])
            return torch.sum(values[0], node.attrs["dims"], keepdim=node.attrs["keep"]) / count
        if node.op in RANDOM:
            with self._randomness(node, after):
                return self._checked(node, self._plainly(seen.node, values), after)
        return self._plainly(seen.node, values)

    def _checked(self, node: Node, made: Tensor, after: str) -> Tensor:
        """What the script's own code returned, if it has the shape that was planned for."""
        wanted = self.local_shape(node, after)
        if list(made.shape) != wanted:
            raise RunError(
                f"{node.name} returned a tensor of shape {list(made.shape)}, planned was {wanted}: its shape "
                "depends on data. Plan a model whose shapes do not."
            )
        return made

    def _loss(self, node: Node, part: Any, n: fx.Node, values: list[Tensor], shared: bool) -> Tensor:
        """A summand of the whole batch's loss: local sums over the count of all targets that are not
        ignored."""
        target: Any = n.target if part is None else LOSSES[type(part)]
        ignored = {} if values[1].is_floating_point() else {"ignore_index": node.attrs["ignored"]}
        total: Tensor = target(values[0], values[1], reduction="sum", **ignored)
        if node.attrs["reduction"] != "mean":
            return total
        if not ignored:
            count: int = prod(self.nodes[node.inputs[1]].shape)
            return total / count
        counted: Tensor = (values[1] != node.attrs["ignored"]).sum()
        if shared:
            dist.all_reduce(counted)
        return total / counted

    @contextmanager
    def _randomness(self, node: Node, after: str) -> Iterator[None]:
        """Dropout: the same for all where all have the tensor, different where they have different parts."""
        with torch.random.fork_rng(devices=[]):
            place = self.places[node.name]
            own = dist.get_rank() + 1 if after != "I" else 0
            torch.manual_seed(((self.seed * 1_000_003 + self.steps) * 10_007 + place) * 4099 + own)
            yield

    def _plainly(self, n: fx.Node, values: list[Tensor]) -> Tensor:
        """A module or function of the script's own on local tensors, in the order in which they were
        seen; one of its results if it has several."""
        first = n.args[0] if n.args else None
        known = isinstance(first, fx.Node) and first in self.traced.names
        call, path = (n, []) if known else picks(n)
        if changes(call, self.traced.module):  # of a tensor that may be held in another form as well
            values = [values[0].clone(), *values[1:]]
        made: Any = self._evaluate(call, values)
        for pick in path:
            made = made[pick]
        found: Tensor = made
        return found

    def _evaluate(self, n: fx.Node, values: Iterable[Tensor]) -> Any:
        left = iter(values)
        known, plain = self.traced.names, self.traced.plain
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda a: next(left) if a in known else plain[a])
        target: Any = n.target
        if n.op == "call_module":
            return self.model.get_submodule(target)(*args, **kwargs)
        return (
            getattr(args[0], target)(*args[1:], **kwargs)
            if n.op == "call_method"
            else target(*args, **kwargs)
        )


def _linear(node: Node, part: Any, values: list[Tensor]) -> Tensor:
    return F.linear(values[0], values[1])


def _bias(node: Node, part: Any, values: list[Tensor]) -> Tensor:
    at = node.attrs["dim"]
    return values[0] + values[1].view([-1 if d == at else 1 for d in range(len(node.shape))])


def _conv(node: Node, part: Any, values: list[Tensor]) -> Tensor:
    return F.conv2d(values[0], values[1], None, part.stride, part.padding, part.dilation, part.groups)


def _embedding(node: Node, part: Any, values: list[Tensor]) -> Tensor:
    found: Tensor = F.embedding(values[0], values[1], part.padding_idx)
    return found


def _norm(node: Node, part: Any, values: list[Tensor]) -> Tensor:
    names = [k for k in ("weight", "bias") if getattr(part, k) is not None]
    weights = dict(zip(names, values[1:], strict=True))
    shape = part.normalized_shape
    return F.layer_norm(values[0], shape, weights.get("weight"), weights.get("bias"), part.eps)


_WITH_WEIGHTS: dict[str, Callable[[Node, Any, list[Tensor]], Tensor]] = {
    "linear": _linear, "bias": _bias, "conv": _conv, "embedding": _embedding, "norm": _norm,
}  # fmt: skip


def _batch_norm(part: Any, values: list[Tensor], shared: bool) -> Tensor:
    """With the statistics of the whole batch, whoever has which samples of it."""
    if not shared or not uses_batch(part):
        plain: Tensor = part(values[0])
        return plain
    x = values[0]
    dims = [d for d in range(x.dim()) if d != 1]
    count = torch.tensor(float(x.numel() // max(x.shape[1], 1)), dtype=x.dtype)
    dist.all_reduce(count)
    along = [1, -1, *[1] * (x.dim() - 2)]
    mean = _summed(x.sum(dims)) / count
    apart = x - mean.view(along)
    variance = _summed(apart.square().sum(dims)) / count
    _remember(part, mean.detach(), variance.detach() * count / (count - 1))
    scale = torch.rsqrt(variance + part.eps)
    made = apart * scale.view(along)
    if len(values) > 1:
        made = made * values[1].view(along)
    return made + values[2].view(along) if len(values) > 2 else made


def _summed(value: Tensor) -> Tensor:
    made: Any = UnevenAllReduce.apply(value)  # type: ignore[no-untyped-call]
    total: Tensor = made
    return total


@torch.no_grad()
def _remember(part: Any, mean: Tensor, variance: Tensor) -> None:
    """Running statistics, as torch keeps them."""
    if not part.track_running_stats or part.running_mean is None:
        return
    part.num_batches_tracked.add_(1)
    share = part.momentum if part.momentum is not None else 1.0 / float(part.num_batches_tracked)
    part.running_mean.lerp_(mean.to(part.running_mean.dtype), share)
    part.running_var.lerp_(variance.to(part.running_var.dtype), share)


def _nothing(shape: list[int], values: list[Tensor]) -> Tensor:
    """What comes of an empty slice, where torch refuses to compute it: still part of the graph, because
    the other ranks' backward passes meet this one's."""
    return torch.zeros(shape, dtype=values[0].dtype) + sum(value.sum() for value in values) * 0
