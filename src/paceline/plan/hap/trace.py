"""A PyTorch module as a HAP graph: traced with torch.fx, with real shapes.

Modules that cannot be traced (control flow that depends on data) and functions that have no rules are
planned as one piece, which every device computes in full; the graph's notes say so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline.errors import ConfigError
from paceline.plan.hap.graph import Graph, Node
from paceline.plan.hap.operations import Seen, describe

MOST_PIECES = 100


@dataclass
class Traced:
    """The graph, and what is needed to carry it out."""

    graph: Graph
    module: fx.GraphModule
    seen: dict[str, Seen] = field(default_factory=dict)
    """For every node of the graph that is computed: the fx node and its arguments."""
    names: dict[fx.Node, str] = field(default_factory=dict)
    """Of the tensors that fx nodes stand for."""
    plain: dict[fx.Node, Any] = field(default_factory=dict)
    """Values of fx nodes that are no tensors: sizes, mostly."""


class _Tracer(fx.Tracer):
    def __init__(self, pieces: set[str]) -> None:
        super().__init__()
        self.pieces, self.path = pieces, [""]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.pieces or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        self.path.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.path.pop()
        return result


def trace(model: nn.Module, example: tuple[Any, ...]) -> Traced:
    """The graph of `model(*example)`."""
    pieces: set[str] = set()
    notes: list[str] = []
    for _ in range(MOST_PIECES):
        tracer = _Tracer(pieces)
        try:
            module = fx.GraphModule(model, tracer.trace(model))
            break
        except Exception as error:
            where, why = tracer.path[-1], " ".join(str(error).split())[:160]
            if not where:
                raise ConfigError(f"the model's own forward cannot be traced: {why}") from error
            pieces.add(where)
            notes.append(f"{where} is planned as one piece, computed in full by every device: {why}")
    else:
        raise ConfigError(f"more than {MOST_PIECES} modules cannot be traced. Last: {notes[-1]}")
    return _Builder(model, module, example, notes).build()


class _Builder(fx.Interpreter):
    """Runs the traced module once, and writes down what every node is."""

    def __init__(
        self, model: nn.Module, module: fx.GraphModule, example: tuple[Any, ...], notes: list[str]
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.model, self.traced, self.example, self.notes = model, module, example, notes
        self.nodes: list[Node] = []
        self.seen: dict[str, Seen] = {}
        self.names: dict[fx.Node, str] = {}
        """Of the tensors that fx nodes stand for."""
        self.leaves: set[str] = set()
        self.parameters = {id(p): name for name, p in model.named_parameters()}

    def build(self) -> Traced:
        with torch.no_grad():
            self.run(*self.example)
        output = next(node for node in self.traced.graph.nodes if node.op == "output").args[0]
        if not isinstance(output, fx.Node) or output not in self.names:
            raise ConfigError(
                "the model returns something else than one tensor; HAP plans models that return one."
            )
        graph = Graph(tuple(self.nodes), self.names[output], tuple(dict.fromkeys(self.notes)))
        plain = {n: v for n, v in self.env.items() if n not in self.names}
        return Traced(graph, self.traced, self.seen, self.names, plain)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "output":
            return value
        tensors = [a for a in n.all_input_nodes if a in self.names]
        if isinstance(value, Tensor):
            if n.op == "placeholder":
                self._leaf(n.name, "input", value)
                self.names[n] = n.name
            elif n.op == "get_attr":
                self.names[n] = self.leaf_of(str(n.target), value)
            elif n.op == "call_function" and not tensors and not any(True for _ in n.all_input_nodes):
                self._leaf(n.name, "constant", value)
                self.seen[n.name] = Seen(n, value=value)
                self.names[n] = n.name
            else:
                self._describe(n, value)
        return value

    def _describe(self, n: fx.Node, value: Tensor) -> None:
        """One or two nodes of the graph: a bias is an operation of its own, so that it is added once."""
        for made, seen, note in describe(n, value, self):
            self.nodes.append(made)
            self.seen[made.name] = seen
            if note:
                self.notes.append(note)
        self.names[n] = self.nodes[-1].name

    def leaf_of(self, target: str, value: Tensor) -> str:
        """The leaf of a parameter or buffer, made when it is met first."""
        name = self.parameters.get(id(value), target)
        if name not in self.leaves:
            self._leaf(name, "parameter" if id(value) in self.parameters else "constant", value)
            self.seen[name] = Seen(None, value=value)
        return name

    def _leaf(self, name: str, op: str, value: Tensor) -> None:
        self.leaves.add(name)
        size = value.numel() * value.element_size()
        attrs = {"trained": value.requires_grad} if op == "parameter" else {}
        self.nodes.append(Node(name, op, (), tuple(value.shape), size, 0.0, attrs))

    def shape(self, n: fx.Node) -> tuple[int, ...]:
        """Of what an fx node stands for."""
        return tuple(self.env[n].shape)
