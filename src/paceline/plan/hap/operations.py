"""Which operation of HAP's theory a node of a torch.fx graph is, with its inputs, attributes and flops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paceline.plan.hap.graph import Node
from paceline.plan.hap.samples import by_sample, products


class Seen(NamedTuple):
    """How a node of the graph is carried out."""

    node: fx.Node | None
    part: str = ""
    """Of an fx node that became two: `product` or `bias`."""
    value: Tensor | None = None
    inputs: tuple[str, ...] = ()


Made = Iterator[tuple[Node, Seen, str]]

UNARY = {
    F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.sigmoid, F.tanh, F.softplus, torch.relu, torch.sigmoid,
    torch.tanh, torch.exp, torch.log, torch.sqrt, torch.abs, operator.pow, torch.pow, F.relu6, F.hardtanh,
    "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "pow", "clamp", torch.clamp,
}  # fmt: skip
UNARY_MODULES = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.ReLU6, nn.Hardtanh,
)  # fmt: skip
SAME = {"contiguous", "clone", "float", "double", "detach", operator.neg, torch.neg, "neg", "to", "type_as"}
ADD = {operator.add, torch.add, "add", operator.iadd, operator.sub, torch.sub, "sub"}
MUL = {operator.mul, torch.mul, "mul", operator.imul, operator.truediv, torch.div, "div"}
DIVIDE = {operator.truediv, torch.div, "div"}
MATMUL = {operator.matmul, torch.matmul, torch.bmm, torch.mm, "matmul", "bmm", "mm"}
RESHAPE = {
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", torch.flatten, torch.reshape,
    torch.unflatten, torch.unsqueeze, torch.squeeze, "view_as",
}  # fmt: skip
ELEMENTWISE = {
    "masked_fill", torch.where, torch.maximum, torch.minimum, operator.eq, operator.ne, operator.lt,
    operator.le, operator.gt, operator.ge,
}  # fmt: skip
CHUNKS = {"chunk", "split", torch.chunk, torch.split}
POOLS = {F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, torch.max_pool2d}
POOL_MODULES = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


def describe(n: fx.Node, value: Tensor, build: Any) -> Made:
    """The node as one operation, or two if it adds a bias."""
    if n.op == "call_module":
        part = build.module.get_submodule(n.target)
        yield from _module(n, part, value, build)
    else:
        yield from _function(n, n.target, value, build)


def _node(n: fx.Node, op: str, value: Tensor, build: Any, flops: float | None = None, **attrs: Any) -> Made:
    inputs = tuple(build.names[a] for a in _tensor_args(n, build))
    work = float(value.numel()) if flops is None else flops
    size = value.numel() * value.element_size()
    yield Node(n.name, op, inputs, tuple(value.shape), size, work, attrs), Seen(n, inputs=inputs), ""


def _tensor_args(n: fx.Node, build: Any) -> list[fx.Node]:
    """The tensors among a node's arguments, in order, twice if they are there twice."""
    found: list[fx.Node] = []
    fx.map_arg((n.args, n.kwargs), lambda a: found.append(a) if a in build.names else None)
    return found


def _piece(n: fx.Node, value: Tensor, build: Any, what: str) -> Made:
    for made, seen, _ in _node(n, "piece", value, build):
        note = f"{n.name} is planned as one piece, computed in full by every device: no rule for {what}"
        yield made, seen, note


def _with_weights(
    n: fx.Node, part: nn.Module, op: str, value: Tensor, build: Any, flops: float, dim: int, **attrs: Any
) -> Made:
    """A product with a weight and, apart from it, a bias."""
    source = build.names[n.args[0]]
    weight: Any = part.weight
    size = value.numel() * value.element_size()
    inputs = (source, build.leaf_of(f"{n.target}.weight", weight))
    bias: Any = part.bias
    name = n.name if bias is None else f"{n.name}.product"
    made = Node(name, op, inputs, tuple(value.shape), size, flops, attrs)
    yield made, Seen(n, "product", inputs=inputs), ""
    if bias is not None:
        both = (name, build.leaf_of(f"{n.target}.bias", bias))
        added = Node(n.name, "bias", both, tuple(value.shape), size, float(value.numel()), {"dim": dim})
        yield added, Seen(n, "bias", inputs=both), ""


def _module(n: fx.Node, part: nn.Module, value: Tensor, build: Any) -> Made:
    kind = type(part)
    if isinstance(part, nn.Linear):
        flops = 2.0 * value.numel() * part.in_features
        yield from _with_weights(n, part, "linear", value, build, flops, value.dim() - 1)
    elif isinstance(part, nn.Conv2d) and part.padding_mode == "zeros":
        flops = 2.0 * value.numel() * prod(part.kernel_size) * part.in_channels / part.groups
        yield from _with_weights(n, part, "conv", value, build, flops, 1, groups=part.groups)
    elif isinstance(part, nn.Embedding) and part.max_norm is None:
        inputs = (build.names[n.args[0]], build.leaf_of(f"{n.target}.weight", part.weight))
        size = value.numel() * value.element_size()
        yield (
            Node(n.name, "embedding", inputs, tuple(value.shape), size, float(value.numel())),
            Seen(n, inputs=inputs),
            "",
        )
    elif isinstance(part, nn.LayerNorm):
        leaves = [(key, p) for key, p in (("weight", part.weight), ("bias", part.bias)) if p is not None]
        inputs = (build.names[n.args[0]], *(build.leaf_of(f"{n.target}.{key}", p) for key, p in leaves))
        size, attrs = value.numel() * value.element_size(), {"dims": len(part.normalized_shape)}
        made = Node(n.name, "norm", inputs, tuple(value.shape), size, 8.0 * value.numel(), attrs)
        yield made, Seen(n, inputs=inputs), ""
    elif isinstance(part, nn.Dropout):
        yield from _node(n, "dropout" if part.p else "unary", value, build)
    elif kind in UNARY_MODULES or isinstance(part, nn.Identity):
        yield from _node(n, "unary", value, build)
    elif isinstance(part, nn.Flatten | nn.Unflatten):
        yield from _node(n, "reshape", value, build, 0.0)
    elif kind in POOL_MODULES:
        yield from _node(n, "pool", value, build)
    elif isinstance(part, nn.Softmax | nn.LogSoftmax) and part.dim is not None:
        yield from _node(n, "softmax", value, build, 5.0 * value.numel(), dim=part.dim % value.dim())
    elif isinstance(part, nn.CrossEntropyLoss | nn.NLLLoss | nn.MSELoss):
        yield from _loss_module(n, part, value, build)
    else:
        yield from whole_module(n, n, part, value, build)


def whole_module(
    n: fx.Node, call: fx.Node, part: nn.Module, value: Tensor, build: Any, place: int = 0
) -> Made:
    """One that has no rules of its own: cut by samples if it treats each of them alone, else one piece.

    `call` is the module's; `n` is that, or what picks one of several results."""
    given = _tensor_args(call, build)
    inputs = [build.names[a] for a in given]
    inputs += [build.leaf_of(f"{call.target}.{key}", p) for key, p in part.named_parameters()]
    size, shape = value.numel() * value.element_size(), tuple(value.shape)
    flops = max(products(part, shape), float(value.numel()))
    attrs = by_sample(part, [build.shape(a) for a in given], shape) if not place else None
    if attrs is not None:
        op = "batch_norm" if "sums" in attrs else "samples"
        yield Node(n.name, op, tuple(inputs), shape, size, flops, attrs), Seen(n, inputs=tuple(inputs)), ""
        return
    kind = type(part).__name__
    note = f"{call.target} is planned as one piece, computed in full by every device: no rule for {kind}"
    yield Node(n.name, "piece", tuple(inputs), shape, size, flops), Seen(n, inputs=tuple(inputs)), note


def _loss_module(n: fx.Node, part: Any, value: Tensor, build: Any) -> Made:
    given = _tensor_args(n, build)
    special = getattr(part, "weight", None) is not None or bool(getattr(part, "label_smoothing", False))
    if value.dim() or special or not _by_target(given, isinstance(part, nn.MSELoss), build):
        yield from whole_module(n, n, part, value, build)
        return
    ignored = getattr(part, "ignore_index", -100)
    flops = 5.0 * prod(build.shape(given[0]))
    yield from _node(n, "loss", value, build, flops, reduction=part.reduction, ignored=ignored)


def _function(n: fx.Node, target: Any, value: Tensor, build: Any) -> Made:
    count = len(_tensor_args(n, build))
    if target in ELEMENTWISE or (target in UNARY and count > 1):
        yield from _node(n, "elementwise", value, build)
    elif target in SAME and count > 1:
        yield from _piece(n, value, build, "tensors made like another one")
    elif target in UNARY:
        yield from _node(n, "unary", value, build)
    elif target in SAME:
        yield from _node(n, "scale", value, build, 0.0)
    elif target in ADD | MUL:
        yield from _arithmetic(n, target, value, build)
    elif target in MATMUL:
        yield from _matmul(n, value, build)
    elif target in RESHAPE:
        yield from _node(n, "reshape", value, build, 0.0)
    elif target in POOLS:
        yield from _node(n, "pool", value, build)
    elif (make := _MAKERS.get(target)) is not None:
        yield from make(n, value, build)
    else:
        yield from _piece(n, value, build, str(getattr(target, "__name__", target)))


def _arithmetic(n: fx.Node, target: Any, value: Tensor, build: Any) -> Made:
    count = len(_tensor_args(n, build))
    if count == 2:
        op = "add" if target in ADD else "mul"
        yield from _node(n, op, value, build, both=target not in DIVIDE)
    elif target in ADD:  # a number is added: summands would have it several times
        yield from _node(n, "unary", value, build)
    else:
        yield from _node(n, "scale" if isinstance(n.args[0], fx.Node) else "unary", value, build)


def _matmul(n: fx.Node, value: Tensor, build: Any) -> Made:
    a, b = (build.shape(x) for x in _tensor_args(n, build)[:2])
    if len(a) < 2 or len(b) < 2:
        yield from _piece(n, value, build, "products of vectors")
        return
    letters = "abcdefgh"[: len(value.shape) - 2]
    left, right = letters[len(letters) - len(a) + 2 :] + "xy", letters[len(letters) - len(b) + 2 :] + "yz"
    if any(d == 1 for d in (*a[:-2], *b[:-2])):
        yield from _piece(n, value, build, "broadcast batches of a product")
        return
    yield from _node(
        n, "einsum", value, build, 2.0 * value.numel() * a[-1], equation=f"{left},{right}->{letters}xz"
    )


def _einsum(n: fx.Node, value: Tensor, build: Any) -> Made:
    equation = str(n.args[0]).replace(" ", "")
    sizes: dict[str, int] = {}
    for term, source in zip(equation.partition("->")[0].split(","), _tensor_args(n, build), strict=True):
        sizes |= dict(zip(term, build.shape(source), strict=True))
    if (
        "->" not in equation
        or "." in equation
        or any(len(set(t)) < len(t) for t in equation.split("->")[0].split(","))
    ):
        yield from _piece(n, value, build, f"einsum {equation!r}")
        return
    yield from _node(n, "einsum", value, build, 2.0 * prod(sizes.values()), equation=equation)


def _transpose(n: fx.Node, value: Tensor, build: Any) -> Made:
    order = list(range(value.dim()))
    given: Any = (*n.args[1:], *n.kwargs.values())
    a, b = (int(x) % value.dim() for x in given)
    order[a], order[b] = order[b], order[a]
    yield from _node(n, "permute", value, build, 0.0, order=order)


def _permute(n: fx.Node, value: Tensor, build: Any) -> Made:
    args: Any = n.args
    given = args[1] if isinstance(args[1], list | tuple) else args[1:]
    order = [int(d) % value.dim() for d in given]
    yield from _node(n, "permute", value, build, 0.0, order=order)


def _attention(n: fx.Node, value: Tensor, build: Any) -> Made:
    if len(_tensor_args(n, build)) != 3 or n.kwargs.get("dropout_p"):
        yield from _piece(n, value, build, "attention with a mask or dropout")
        return
    keys = build.shape(n.args[1])
    yield from _node(n, "attention", value, build, 4.0 * value.numel() * keys[-2])


def _softmax(n: fx.Node, value: Tensor, build: Any) -> Made:
    dim: Any = n.kwargs.get("dim", n.args[1] if len(n.args) > 1 else None)
    yield from _node(n, "softmax", value, build, 5.0 * value.numel(), dim=int(dim) % value.dim())


def _loss(n: fx.Node, value: Tensor, build: Any) -> Made:
    known = ("reduction", "ignore_index", "input", "target")
    special = any(v not in (None, 0.0) for key, v in n.kwargs.items() if key not in known)
    given = _tensor_args(n, build)
    if value.dim() or special or len(n.args) > 2 or not _by_target(given, n.target is F.mse_loss, build):
        yield from _piece(n, value, build, "a loss with settings")
        return
    flops = 5.0 * prod(build.shape(given[0]))
    how = {"reduction": n.kwargs.get("reduction", "mean"), "ignored": n.kwargs.get("ignore_index", -100)}
    yield from _node(n, "loss", value, build, flops, **how)


def _by_target(given: list[fx.Node], squares: bool, build: Any) -> bool:
    """Whether a loss is a sum over targets: classes for scores, or a number for each number."""
    if len(given) != 2:
        return False
    if squares:
        return bool(build.shape(given[0]) == build.shape(given[1]))
    return not build.values[given[1]].is_floating_point()


def _dropout(n: fx.Node, value: Tensor, build: Any) -> Made:
    yield from _node(n, "dropout", value, build)


def _reduced(n: fx.Node, value: Tensor, build: Any) -> Made:
    shape = build.shape(n.args[0])
    dim: Any = n.kwargs.get("dim", n.args[1] if len(n.args) > 1 else None)
    dims = list(range(len(shape))) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    name = str(getattr(n.target, "__name__", n.target))
    dims = [int(d) % len(shape) for d in dims]
    keep = len(value.shape) == len(shape)
    yield from _node(
        n, "mean" if name == "mean" else "sum", value, build, float(prod(shape)), dims=dims, keep=keep
    )


def _cat(n: fx.Node, value: Tensor, build: Any) -> Made:
    dim: Any = n.kwargs.get("dim", n.args[1] if len(n.args) > 1 else 0)
    yield from _node(n, "cat", value, build, 0.0, dim=int(dim) % value.dim())


def _getitem(n: fx.Node, value: Tensor, build: Any) -> Made:
    """A piece of a chunked tensor, or a slice; dimensions of which all is taken stay as they are."""
    source: Any = n.args[0]
    if source in build.names and (stay := _staying(build.shape(source), n.args[1])) is not None:
        yield from _node(n, "index", value, build, 0.0, stay=stay)
    elif source not in build.names and source.op != "call_module" and source.target in CHUNKS:
        old = build.shape(source.args[0])
        stay = [(k, k) for k in range(len(old)) if old[k] == value.shape[k]]
        inputs = (build.names[source.args[0]],)
        size = value.numel() * value.element_size()
        yield (
            Node(n.name, "index", inputs, tuple(value.shape), size, 0.0, {"stay": stay}),
            Seen(n, inputs=inputs),
            "",
        )
    elif source in build.names:
        yield from _piece(n, value, build, "this kind of indexing")
    else:
        yield from _picked(n, value, build)


def picks(n: fx.Node) -> tuple[fx.Node, list[Any]]:
    """The call that returned several results, and which of them a node picks."""
    path: list[Any] = []
    while n.target is operator.getitem:
        path, n = [n.args[1], *path], n.args[0]  # type: ignore[assignment]
    return n, path


def _picked(n: fx.Node, value: Tensor, build: Any) -> Made:
    """One of several results of a call, which is then made for each of them."""
    call, path = picks(n)
    if call.op == "call_module":
        part = build.module.get_submodule(str(call.target))
        yield from whole_module(n, call, part, value, build, place=int(path != [0]))
        return
    for made, seen, note in _piece(call, value, build, str(getattr(call.target, "__name__", call.target))):
        yield made._replace(name=n.name), seen._replace(node=n), note.replace(call.name, n.name, 1)


def _staying(shape: tuple[int, ...], index: Any) -> list[tuple[int, int]] | None:
    given = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(each, int | slice) for each in given):
        return None
    stay, new = [], 0
    for old in range(len(shape)):
        each = given[old] if old < len(given) else slice(None)
        if isinstance(each, slice):
            if each == slice(None):
                stay.append((old, new))
            new += 1
    return stay


_MAKERS: dict[Any, Callable[[fx.Node, Tensor, Any], Made]] = {
    torch.einsum: _einsum, "transpose": _transpose, torch.transpose: _transpose, "permute": _permute,
    torch.permute: _permute, F.scaled_dot_product_attention: _attention, F.softmax: _softmax,
    torch.softmax: _softmax, "softmax": _softmax, F.log_softmax: _softmax, "log_softmax": _softmax,
    F.dropout: _dropout, F.cross_entropy: _loss, F.nll_loss: _loss, F.mse_loss: _loss, "sum": _reduced,
    torch.sum: _reduced, "mean": _reduced, torch.mean: _reduced, torch.cat: _cat, operator.getitem: _getitem,
}  # fmt: skip
