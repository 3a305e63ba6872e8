"""A PyTorch module as a HAP graph: traced with torch.fx, for one call with tensors of known shape.

Tracing goes along with shapes (fake tensors), so whatever depends on sizes is decided as in that call:
asserts, branches, arguments that are None. Modules that cannot be traced (control flow that depends on
data) and functions that have no rules are planned as one piece, which every device computes in full; the
graph's notes say so. Randomness outside of dropout would be frozen, so it is refused."""

from __future__ import annotations

import inspect
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicShape
from torch.fx.proxy import TraceError

from paceline.errors import ConfigError
from paceline.plan.hap.graph import Graph, Node
from paceline.plan.hap.in_place import check_in_place
from paceline.plan.hap.operations import Seen, describe

MOST_PIECES = 100
PLAIN = (int, float, bool, str, torch.Size, torch.dtype, torch.device, torch.layout, type(None))
"""What is known for one call, and need not be traced."""
DATA = {
    "item", "tolist", "numpy", "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select",
    "equal", "allclose", "is_nonzero", "bincount",
}  # fmt: skip
"""Functions whose result, or its shape, depends on the numbers that they are given."""
_PLAIN_MODULE: dict[str, Any] = {"__call__": nn.Module.__call__, "__getattr__": nn.Module.__getattr__}


@dataclass
class Traced:
    """The graph, and what is needed to carry it out."""

    graph: Graph
    module: fx.GraphModule
    plain_args: tuple[Any, ...] = ()
    """The arguments of the call; None in the places of tensors."""
    place: int | None = None
    """Which of several results is the one that is planned; None if there is only one."""
    others: tuple[Any, ...] = ()
    """The other ones: plain values, or `Unplanned`."""
    seen: dict[str, Seen] = field(default_factory=dict)
    """For every node of the graph that is computed: the fx node and its arguments."""
    names: dict[fx.Node, str] = field(default_factory=dict)
    """Of the tensors that fx nodes stand for."""
    plain: dict[fx.Node, Any] = field(default_factory=dict)
    """Values of fx nodes that are no tensors: pieces of a split one, mostly."""


class Unplanned:
    """A result of the model that is not planned: nobody has it."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            "the model returns several tensors, of which only the loss is planned; the script uses another "
            "one. Let the model return what the script uses."
        )

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls().used


def by_position(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A call's arguments in the order of the model's forward, those that were left out included."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"the model cannot be called like this: {error}.") from None
    bound.apply_defaults()
    if bound.kwargs:
        raise ConfigError(
            f"the model takes {', '.join(map(repr, bound.kwargs))} by name only; HAP plans calls by position."
        )
    for value in bound.args:
        if not isinstance(value, (Tensor, *PLAIN)):
            raise ConfigError(
                f"the model is called with a {type(value).__name__}; HAP plans calls with tensors, numbers "
                "and None."
            )
    return bound.args


def trace(model: nn.Module, example: tuple[Any, ...]) -> Traced:
    """The graph of `model(*example)`."""
    example, before = by_position(model.forward, example, {}), _randomness()
    with _buffers_kept(model):
        try:
            tracer, module, notes = _traced(model, example, FakeTensorMode(allow_non_fake_inputs=True))
        except (DataDependentOutputException, DynamicShape):  # some piece wants to see data: then let it
            tracer, module, notes = _traced(model, example, nullcontext())
    if _randomness() != before:
        raise ConfigError(
            "the model draws random numbers in its forward (torch.rand or the like), which a plan would "
            "draw once and for all. Use nn.Dropout, or give the noise as an input."
        )
    check_in_place(module)
    return _Builder(model, module, tracer.values, example, notes).build()


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """BatchNorm and the like count calls; this one does not count."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def _randomness() -> tuple[bytes, Any]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


def _traced(
    model: nn.Module, example: tuple[Any, ...], mode: Any
) -> tuple[_Tracer, fx.GraphModule, list[str]]:
    pieces: set[str] = set()
    notes: list[str] = []
    for _ in range(MOST_PIECES):
        tracer = _Tracer(example, mode, pieces)
        try:
            graph = tracer.trace(model)
            return tracer, fx.GraphModule(tracer.root, graph), notes
        except (DataDependentOutputException, DynamicShape):
            raise
        except Exception as error:
            where, why = tracer.path[-1], " ".join(str(error).split())[:160]
            if not where:
                raise ConfigError(f"the model's own forward cannot be traced: {why}") from error
            pieces.add(where)
            notes.append(f"{where} is planned as one piece, computed in full by every device: {why}")
    raise ConfigError(f"more than {MOST_PIECES} modules cannot be traced. Last: {notes[-1]}")


class _Tracer(fx.Tracer):
    """Computes what every node stands for as it is met."""

    def __init__(self, example: tuple[Any, ...], mode: Any, pieces: set[str]) -> None:
        super().__init__()
        self.example, self.mode, self.pieces, self.path = example, mode, pieces, [""]
        self.values: dict[fx.Node, Any] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.pieces or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        self.path.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.path.pop()
        return result

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        names = iter(_names(root_fn, len(self.example)))
        args: list[Any] = [self.root]
        for name, value in zip(names, self.example, strict=True):
            is_tensor = isinstance(value, Tensor)
            args.append(self.create_proxy("placeholder", name, (), {}) if is_tensor else value)
            if is_tensor:
                fake = isinstance(self.mode, FakeTensorMode)
                self.values[args[-1].node] = self.mode.from_tensor(value) if fake else value
        return root_fn, args

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Known(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        made = super().create_proxy(kind, target, args, kwargs, *more, **named)
        if kind in ("placeholder", "output"):
            return made
        if _sees_data(made.node, self.values):
            raise TraceError(f"{getattr(target, '__name__', target)} depends on data, and not only on shapes")
        value = self.values[made.node] = self._computed(made.node)
        return value if isinstance(value, PLAIN) else made

    def _computed(self, n: fx.Node) -> Any:
        target: Any = n.target
        if n.op == "get_attr":
            with _not_traced():
                return attrgetter(target)(self.root)
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda a: self._value(a))
        with _not_traced(), torch.no_grad(), torch.random.fork_rng(devices=[]), self.mode:
            if n.op == "call_module":
                return self.root.get_submodule(target)(*args, **kwargs)
            return (
                getattr(args[0], target)(*args[1:], **kwargs)
                if n.op == "call_method"
                else target(*args, **kwargs)
            )

    def _value(self, n: fx.Node) -> Any:
        if n not in self.values:  # a constant that was met just now
            self.values[n] = self._computed(n)
        return self.values[n]


@contextmanager
def _not_traced() -> Iterator[None]:
    """Modules are called and looked into as ever, although a trace is under way."""
    traced = {name: getattr(nn.Module, name) for name in _PLAIN_MODULE}
    for name, plain in _PLAIN_MODULE.items():
        setattr(nn.Module, name, plain)
    try:
        yield
    finally:
        for name, patched in traced.items():
            setattr(nn.Module, name, patched)


def _sees_data(n: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether what comes out is decided by the numbers in a tensor: a number, or a shape."""
    if n.op not in ("call_method", "call_function"):
        return False
    if n.target is operator.getitem:
        index: list[Any] = []
        fx.map_arg(n.args[1], lambda a: index.append(values.get(a)))
        return any(isinstance(value, Tensor) and value.dtype == torch.bool for value in index)
    return str(getattr(n.target, "__name__", n.target)) in DATA


class _Known(fx.Proxy):
    """Stands for a tensor whose shape is known."""

    def _known(self) -> Any:
        return self.tracer._value(self.node)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._known(), name)
        return value if isinstance(value, PLAIN) else super().__getattr__(name)

    def __len__(self) -> int:
        return len(self._known())

    def __iter__(self) -> Iterator[Any]:
        known: Any = self
        return iter([known[place] for place in range(len(self._known()))])


def _names(forward: Any, count: int) -> list[str]:
    """Of the arguments after `self`; those of *args are numbered."""
    names: list[str] = []
    for name, parameter in list(inspect.signature(forward).parameters.items())[1:]:
        many = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}_{place}" for place in range(count - len(names))] if many else [name]
    return names[:count]


class _Builder:
    """Writes down what every node of the traced module is."""

    def __init__(
        self,
        model: nn.Module,
        module: fx.GraphModule,
        values: dict[fx.Node, Any],
        example: tuple[Any, ...],
        notes: list[str],
    ) -> None:
        self.model, self.module, self.values, self.example, self.notes = model, module, values, example, notes
        self.nodes: list[Node] = []
        self.seen: dict[str, Seen] = {}
        self.names: dict[fx.Node, str] = {}
        """Of the tensors that fx nodes stand for."""
        self.leaves: set[str] = set()
        self.parameters = {id(p): name for name, p in model.named_parameters()}

    def build(self) -> Traced:
        for n in self.module.graph.nodes:
            self._write(n)
        result = next(node for node in self.module.graph.nodes if node.op == "output").args[0]
        output, place = self._planned(result)
        graph = Graph(tuple(self.nodes), self.names[output], tuple(dict.fromkeys(self.notes)))
        plain = {n: v for n, v in self.values.items() if n not in self.names}
        given = tuple(None if isinstance(value, Tensor) else value for value in self.example)
        others = () if place is None else tuple(Unplanned() if r in self.names else r for r in result)
        return Traced(_living(graph), self.module, given, place, others, self.seen, self.names, plain)

    def _planned(self, result: Any) -> tuple[fx.Node, int | None]:
        """The one tensor that is returned; of several, the loss."""
        if isinstance(result, fx.Node) and result in self.names:
            return result, None
        if isinstance(result, list | tuple):
            known = [(place, each) for place, each in enumerate(result) if each in self.names]
            losses = [(each, place) for place, each in known if self.shape(each) == ()]
            if len(losses) == 1 or len(known) == 1:
                each, place = losses[0] if losses else known[0][::-1]
                return each, place
        raise ConfigError(
            "the model returns something else than one tensor, or several with one loss among them. Let it "
            "return the scores, or the loss."
        )

    def _write(self, n: fx.Node) -> None:
        value = self.values.get(n)
        if not isinstance(value, Tensor):
            return
        if n.op == "placeholder":
            self._leaf(n.name, "input", value)
            self.names[n] = n.name
        elif n.op == "get_attr":
            self.names[n] = self.leaf_of(str(n.target), value)
        else:
            self._describe(n, value)

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
        return tuple(self.values[n].shape)


def _living(graph: Graph) -> Graph:
    """Without what the output does not depend on."""
    wanted, kept = {graph.output}, []
    for node in reversed(graph.nodes):
        if node.name in wanted or node.op == "input":
            wanted |= set(node.inputs)
            kept.append(node)
    return graph._replace(nodes=tuple(reversed(kept)))
