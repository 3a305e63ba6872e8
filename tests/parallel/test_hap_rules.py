"""Every rule of HAP's theory, as ranks carry it out: slices and summands put together are the whole."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.plans.hap.compute import HapComputing
from paceline.plan.hap.graph import Node
from paceline.plan.hap.rules import _RULES, ShardingRule, dim_of, granules, round_lengths, rules_of
from paceline.plan.hap.trace import Traced, trace
from support.hap_models import Attention, Experts

RATIOS = ((0.1, 0.2, 0.3, 0.4), (0.5, 0.0, 0.5, 0.0), (0.6, 0.4))
NOT_HERE = {"dropout"}
"""Draws numbers of its own on each rank; apart from that it is `unary`."""


class Everything(nn.Module):
    """One of each kind of operation that the small models do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.groups = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 6, 3, groups=2)
        self.norm, self.each = nn.BatchNorm2d(6).eval(), nn.GroupNorm(2, 6)
        self.pool, self.line, self.lstm = nn.MaxPool2d(2), nn.Linear(6, 8), nn.LSTM(8, 4)
        self.layer = nn.LayerNorm((6, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.each(self.norm(self.conv(x)))
        x = self.pool(self.groups(x)).flatten(2)
        x = self.line(x.transpose(1, 2))
        y, _ = self.lstm(x.permute(1, 0, 2))
        x = torch.cat([x, x * 2.0 - y.transpose(0, 1).repeat_interleave(2, 2)], dim=1)
        x = torch.softmax(x.unflatten(1, (6, -1)), -1).sum(2) + x[:, 0:6]
        x = self.layer(x) @ x.transpose(1, 2)
        x = torch.where(x > 0, x, x.mean(dim=2, keepdim=True)) * torch.tanh(x)
        return (x[:, 1] + x.sum((1,))) / torch.exp(x[:, 2])


class Losses(nn.Module):
    """With one target for each sample, for each place, and for each number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.kind == "numbers":
            return F.mse_loss(x, y)
        return F.cross_entropy(x, y, reduction="sum")


def whole_values(traced: Traced, computing: HapComputing, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What one process computes."""
    values: dict[str, Tensor] = {}
    given = iter(inputs)
    parameters = dict(computing.model.named_parameters())
    for node in traced.graph.nodes:
        if node.op == "input":
            values[node.name] = next(given)
        elif node.leaf:
            value = parameters[node.name] if node.op == "parameter" else traced.seen[node.name].value
            assert value is not None
            values[node.name] = value
        else:
            values[node.name] = computing.carry_out(node, [values[name] for name in node.inputs], "I")
    return values


class Ranks:
    """All ranks of a program, one after another in this process."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...], ratios: tuple[float, ...]) -> None:
        self.traced, self.ratios, self.rank = trace(model, inputs), ratios, 0
        self.nodes, self.sizes = self.traced.graph.by_name(), granules(self.traced.graph)
        self.computing = HapComputing(model, self.traced, self.nodes, self._local_shape, 0)
        self.values = whole_values(self.traced, self.computing, inputs)
        self._draw = torch.Generator().manual_seed(0)

    def lengths(self, name: str, dim: int) -> list[int]:
        """How much of a dimension each rank has."""
        size = self.sizes[name, dim]
        return [size * units for units in round_lengths(self.ratios, self.nodes[name].shape[dim] // size)]

    def _local_shape(self, node: Node, held: str) -> list[int]:
        shape, dim = list(node.shape), dim_of(held)
        if dim is not None:
            shape[dim] = self.lengths(node.name, dim)[self.rank]
        return shape

    def rules(self) -> Iterator[tuple[Node, ShardingRule]]:
        """Of all operations; those that would cut what has to stay together are left out, as in a search."""
        for node in self.nodes.values():
            for rule in () if node.leaf else rules_of(node, [self.nodes[i].shape for i in node.inputs]):
                held = [*zip(node.inputs, rule.pre, strict=True), (node.name, rule.post)]
                dims = [(name, dim) for name, how in held if (dim := dim_of(how)) is not None]
                if all(self.nodes[n].shape[d] // self.sizes[n, d] > 1 for n, d in dims):
                    yield node, rule

    def parts(self, name: str, held: str) -> list[Tensor]:
        """A tensor as each rank holds it."""
        value, dim, count = self.values[name], dim_of(held), len(self.ratios)
        if dim is not None:
            lengths = self.lengths(name, dim)
            starts = accumulate(lengths, initial=0)
            return [value.narrow(dim, start, n) for start, n in zip(starts, lengths, strict=False)]
        if held == "I":
            return [value] * count
        some = [torch.randn(value.shape, generator=self._draw, dtype=value.dtype) for _ in range(count - 1)]
        return [*some, value - torch.stack(some).sum(0)]

    def put_together(self, node: Node, rule: ShardingRule) -> Tensor:
        """What all ranks' results make, and the rank's own shape of each is checked."""
        known: dict[tuple[str, str], list[Tensor]] = {}
        for name, held in zip(node.inputs, rule.pre, strict=True):
            known[name, held] = known.get((name, held)) or self.parts(name, held)
        made = []
        for rank in range(len(self.ratios)):
            self.rank = rank
            given = [known[name, held][rank] for name, held in zip(node.inputs, rule.pre, strict=True)]
            made.append(self.computing.carry_out(node, given, rule.post))
            assert list(made[-1].shape) == self._local_shape(node, rule.post)
        dim = dim_of(rule.post)
        if dim is not None:
            return torch.cat(made, dim)
        return torch.stack(made).sum(0) if rule.post == "R" else made[-1]


def cases() -> list[tuple[nn.Module, tuple[Tensor, ...]]]:
    torch.manual_seed(5)
    classes, letters = torch.randint(0, 5, (8, 6)), torch.randint(0, 11, (8, 6))
    return [
        (Everything(), (torch.randn(8, 4, 8, 6),)),
        (Experts(), (torch.randn(8, 12),)),
        (Attention(), (letters,)),
        (Losses("samples"), (torch.randn(8, 5), classes[:, 0])),
        (Losses("places"), (torch.randn(8, 5, 6), classes)),
        (Losses("numbers"), (torch.randn(8, 6), torch.randn(8, 6))),
    ]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Operations that draw numbers ask for their rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "meeting"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_slices_and_summands_of_every_rule_are_the_whole_result_put_together() -> None:
    seen: dict[str, set[str]] = {}
    for model, inputs in cases():
        doubled = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        for ratios in RATIOS:
            ranks = Ranks(model.double(), doubled, ratios)
            for node, rule in ranks.rules():
                found, expected = ranks.put_together(node, rule), ranks.values[node.name]
                where = f"{type(model).__name__} {node.name} ({node.op}) {rule}"
                assert found.shape == expected.shape, where
                torch.testing.assert_close(
                    found, expected, rtol=1e-9, atol=1e-9, msg=lambda m, w=where: f"{w}: {m}"
                )
                seen.setdefault(node.op, set()).update(how[0] for how in (*rule.pre, rule.post))
    assert set(_RULES) - NOT_HERE <= set(seen), "a rule of some operation is not tried"
    summed = {op for op, kinds in seen.items() if "R" in kinds}
    assert {"linear", "scale", "add", "mul", "einsum", "permute", "reshape", "sum", "mean", "cat"} <= summed
    assert {"loss", "conv", "index"} <= summed


def test_a_rule_that_is_wrong_would_be_seen(group: Any) -> None:
    """Summands through something that is not linear."""
    ranks = Ranks(
        nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double(), (torch.randn(4, 6).double(),), (0.5, 0.5)
    )
    node = next(node for node in ranks.nodes.values() if node.op == "unary")
    found = ranks.put_together(node, ShardingRule(("R",), "R"))
    assert not torch.allclose(found, ranks.values[node.name])
