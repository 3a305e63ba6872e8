"""The single-device program that HAP cuts up: operations on tensors of known shape, in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from paceline.plan.profile.files import digest

LEAVES = ("input", "constant", "parameter")


class Node(NamedTuple):
    """One operation, or a leaf: an input, a constant, a parameter."""

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    size_bytes: int = 0
    flops: float = 0.0
    """Of the forward pass, for the whole batch."""
    attrs: dict[str, Any] = {}
    segment: int = 0

    @property
    def leaf(self) -> bool:
        """Whether nothing is computed."""
        return self.op in LEAVES


class Graph(NamedTuple):
    """Nodes in an order in which they can be computed; the last result is `output`."""

    nodes: tuple[Node, ...]
    output: str
    notes: tuple[str, ...] = ()
    """What is planned as one piece, and why."""

    def by_name(self) -> dict[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @property
    def loss(self) -> bool:
        """Whether the output is a loss, and not something that the script goes on with."""
        return self.by_name()[self.output].shape == ()

    def fingerprint(self) -> str:
        """Of the operations and their shapes."""
        return digest([[n.name, n.op, list(n.inputs), list(n.shape)] for n in self.nodes])

    def last_uses(self) -> dict[str, int]:
        """Where each tensor is needed for the last time."""
        last = {name: place for place, node in enumerate(self.nodes) for name in node.inputs}
        return last | {self.output: len(self.nodes)}

    def parts(self, count: int) -> Graph:
        """Cut into so many segments of about equal flops, each of which may have ratios of its own."""
        total, so_far, nodes = sum(n.flops for n in self.nodes) or 1.0, 0.0, []
        for node in self.nodes:
            nodes.append(node._replace(segment=min(count - 1, int(count * so_far / total))))
            so_far += node.flops
        return self._replace(nodes=tuple(nodes))


def make_graph(nodes: Iterable[Node], output: str | None = None) -> Graph:
    """A graph by hand."""
    made = tuple(nodes)
    return Graph(made, output or made[-1].name)
