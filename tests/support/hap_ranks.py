"""What every rank of the HAP tests does; started by `run_ranks`."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.parallel.plans.hap.program import HapProgram
from paceline.parallel.plans.hap.uneven import (
    AllGather,
    ReduceScatter,
    Slice,
    UnevenAllReduce,
    UnevenAllToAll,
    gather_pieces,
)
from paceline.plan.hap.plan import HapPlan
from paceline.plan.hap.trace import trace
from support.hap_models import WithLoss, model


def everything(rank: int, size: int, request: Any) -> Any:
    """All checks in one go: starting processes is what takes the time."""
    plans = [_case(rank, case) for case in request["cases"]]
    return {"plans": plans, "adjoint": _adjoint(rank, size), "same": _same(rank, size)}


def _case(rank: int, case: Any) -> dict[str, float]:
    """How far loss, gradients and weights are from those of one process."""
    plan = msgspec.convert(case["plan"], HapPlan)
    whole, x, y = model(case["kind"])
    if case["loss"]:
        whole, inputs = WithLoss(whole), (x, y)
    else:
        inputs = (x,)
    mine = copy.deepcopy(whole)
    program = HapProgram(mine, trace(mine, inputs), plan)
    steps = (
        torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9),
        torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9),
    )
    apart = {"loss": 0.0, "gradients": 0.0, "weights": 0.0, "norm": 0.0}
    for _ in range(2):
        expected = whole(*inputs) if case["loss"] else _loss(_scores(whole(*inputs)), y)
        expected.backward()
        got = program(*inputs) if case["loss"] else _loss(_scores(program(*inputs)), y)
        got.backward()
        total = got.detach().clone()
        program.add_up()
        gradients = {name: _grad(p) for name, p in program.parameters.items()}
        reference = {name: _grad(p) for name, p in whole.named_parameters()}
        norm = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9))
        apart["norm"] = max(apart["norm"], abs(program.norm() - norm))
        apart["loss"] = max(apart["loss"], float((total - expected).abs()))
        apart["gradients"] = max(apart["gradients"], _apart(program.whole(gradients), reference))
        for step in steps:
            step.step()
            step.zero_grad()
    weights = program.whole({name: p.data for name, p in program.parameters.items()})
    apart["weights"] = _apart(weights, {name: p.data for name, p in whole.named_parameters()})
    buffers = {name: b.double() for name, b in whole.named_buffers()}
    apart["buffers"] = _apart({n: b.double() for n, b in mine.named_buffers()}, buffers) if buffers else 0.0
    return apart


def _scores(result: Any) -> Tensor:
    """What a model returns, maybe beside a loss that it was not asked for."""
    scores: Tensor = result[0] if isinstance(result, tuple) else result
    return scores


def _loss(scores: Tensor, y: Tensor) -> Tensor:
    return (
        F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-1)
        if scores.dim() == 3
        else F.cross_entropy(scores, y)
    )


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _apart(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return max(float((some[name] - others[name]).abs().max()) for name in others)


def _adjoint(rank: int, size: int) -> float:
    """The largest of |<A x, y> - <x, A' y>|, summed over ranks, for uneven lengths and zeros."""
    worst = 0.0
    torch.manual_seed(rank)
    lengths, others = ([1, 0, 4, 2], [2, 3, 1, 0]) if size == 4 else ([1] * size, [2] * size)
    a, b = lengths[rank], others[rank]
    cases: list[tuple[Any, Tensor, tuple[Any, ...]]] = [(UnevenAllReduce, torch.randn(3, 5), ())]
    for variant in ("padded", "grouped"):
        cases.append((AllGather, torch.randn(3, a), (1, lengths, variant)))
        cases.append((ReduceScatter, torch.randn(3, sum(lengths)), (1, lengths, variant)))
    cases.append((Slice, torch.randn(sum(others), 3), (0, others)))
    cases.append((UnevenAllToAll, torch.randn(a, sum(others), 2), (0, lengths, 1, others)))
    assert b == others[rank]
    for function, given, how in cases:
        x = given.double().requires_grad_()
        out = function.apply(x, *how)
        y = torch.randn_like(out)
        out.backward(y)
        pair = torch.stack([(out.detach() * y).sum(), (x.detach() * x.grad).sum()])
        dist.all_reduce(pair)
        worst = max(worst, float((pair[0] - pair[1]).abs()))
    return worst


def _same(rank: int, size: int) -> bool:
    """Whether both ways to gather give the same bits, and the right ones."""
    lengths = [3, 0, 1, 5][:size]
    made = torch.Generator().manual_seed(0)
    full = torch.randn(2, sum(lengths), generator=made)
    mine = full.narrow(1, sum(lengths[:rank]), lengths[rank])
    both = [gather_pieces(mine, 1, lengths, variant) for variant in ("padded", "grouped")]
    return all(torch.equal(one, full) for one in both)
