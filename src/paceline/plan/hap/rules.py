"""HAP's background theory: how an operation can be carried out on tensors that are spread over devices.

A tensor is held in one of three ways (its *property*): `I`, every device has all of it; `R`, every device
has a summand of the full shape; `G2`, every device has a slice of dimension 2. A rule says which
properties an operation needs of its inputs, and which one its result then has. The same words as
DTensor's Replicate, Partial and Shard.

The backward pass follows by duality: gradients of `I` are `R`, of `G` are `G`, of `R` are `I`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.plan.hap.graph import Graph, Node

IDENTITY, REDUCE = "I", "R"
Shape = tuple[int, ...]


class ShardingRule(NamedTuple):
    """Needs of the inputs, and what the result then is."""

    pre: tuple[str, ...]
    post: str
    sums: int = 0
    """Bytes that are added up over devices within the operation."""

    @property
    def shared(self) -> bool:
        """Whether devices do different parts of the work."""
        return any(p.startswith("G") for p in (*self.pre, self.post))


def gather(dim: int) -> str:
    """A slice of this dimension each."""
    return f"G{dim}"


def dim_of(held: str) -> int | None:
    """The dimension that is sliced, if one is."""
    return int(held[1:]) if held.startswith("G") else None


CHEAP = frozenset(
    ("unary", "scale", "dropout", "softmax", "sum", "mean", "permute", "reshape", "loss", "bias", "index")
)
"""Results that are not moved: their inputs can be moved as well, and the search stays small."""


def rules_of(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    """All rules of an operation, given its inputs' shapes; carrying it out everywhere in full is always
    one."""
    make = _RULES.get(node.op)
    whole = ShardingRule((IDENTITY,) * len(shapes), IDENTITY)
    made = [whole, *(make(node, shapes) if make else [])]
    known = dict(zip(node.inputs, shapes, strict=True))
    return [rule for rule in dict.fromkeys(made) if _possible(rule, node, known)]


def _possible(rule: ShardingRule, node: Node, shapes: dict[str, Shape]) -> bool:
    """A dimension of length 1 is not cut, and one tensor is not wanted in two ways at a time."""
    wanted: dict[str, str] = {}
    for name, held in zip(node.inputs, rule.pre, strict=True):
        dim = dim_of(held)
        if wanted.setdefault(name, held) != held or (dim is not None and shapes[name][dim] < 2):
            return False
    dim = dim_of(rule.post)
    return dim is None or node.shape[dim] >= 2


def _linear(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    last = len(shapes[0]) - 1
    made = [ShardingRule((gather(k), IDENTITY), gather(k)) for k in range(last)]
    made.append(ShardingRule((IDENTITY, gather(0)), gather(last)))
    made.append(ShardingRule((gather(last), gather(1)), REDUCE))
    return [*made, ShardingRule((REDUCE, IDENTITY), REDUCE)]


def _bias(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    at = node.attrs["dim"]
    return [
        ShardingRule((gather(k), gather(0) if k == at else IDENTITY), gather(k))
        for k in range(len(shapes[0]))
    ]


def _unary(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    others = (IDENTITY,) * (len(shapes) - 1)
    return [ShardingRule((gather(k), *others), gather(k)) for k in range(len(shapes[0]))]


def _scale(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    return [*_unary(node, shapes), ShardingRule((REDUCE,), REDUCE)]


def _broadcast(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    """Element by element; a dimension that an input lacks, or has at length 1, is whole there."""
    made = []
    for k in range(len(node.shape)):
        pre = []
        for shape in shapes:
            own = k - (len(node.shape) - len(shape))
            pre.append(gather(own) if own >= 0 and shape[own] > 1 else IDENTITY)
        made.append(ShardingRule(tuple(pre), gather(k)))
    return made


def _add(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    same = all(shape == node.shape for shape in shapes)
    return [*_broadcast(node, shapes), *([ShardingRule((REDUCE,) * len(shapes), REDUCE)] if same else [])]


def _mul(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    either = [ShardingRule((REDUCE, IDENTITY), REDUCE), ShardingRule((IDENTITY, REDUCE), REDUCE)]
    return [*_broadcast(node, shapes), *(either if node.attrs.get("both", True) else either[:1])]


def _letters(terms: Sequence[str], out: str) -> list[ShardingRule]:
    """Of an einsum: a letter in the result is a free or batch dimension, any other is summed over."""
    made = []
    for letter in dict.fromkeys("".join(terms)):
        pre = tuple(gather(term.index(letter)) if letter in term else IDENTITY for term in terms)
        made.append(ShardingRule(pre, gather(out.index(letter)) if letter in out else REDUCE))
    for place in range(len(terms)):
        made.append(
            ShardingRule(tuple(REDUCE if i == place else IDENTITY for i in range(len(terms))), REDUCE)
        )
    return made


def _einsum(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    terms, _, out = node.attrs["equation"].replace(" ", "").partition("->")
    return _letters(terms.split(","), out)


def _permute(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    order = node.attrs["order"]
    return [
        *(ShardingRule((gather(k),), gather(order.index(k))) for k in range(len(order))),
        ShardingRule((REDUCE,), REDUCE),
    ]


def _reshape(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    pairs = leading_pairs(shapes[0], node.shape)
    return [*(ShardingRule((gather(a),), gather(b)) for a, b in pairs), ShardingRule((REDUCE,), REDUCE)]


def leading_pairs(old: Shape, new: Shape) -> list[tuple[int, int]]:
    """Dimensions that stay what a slice is cut from: the first of each group of dimensions with one
    product."""
    pairs, a, b = [], 0, 0
    while a < len(old) and b < len(new):
        first_a, first_b, left, right = a, b, old[a], new[b]
        a, b = a + 1, b + 1
        while left != right:
            if left < right:
                left, a = left * old[a], a + 1
            else:
                right, b = right * new[b], b + 1
        pairs.append((first_a, first_b))
    return pairs


def _norm(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    return _unary(node, shapes)[: len(shapes[0]) - node.attrs["dims"]]


def _batch_norm(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    """Over samples: their statistics are added up, unless they are given."""
    others = (IDENTITY,) * (len(shapes) - 1)
    return [ShardingRule((gather(0), *others), gather(0), node.attrs["sums"])]


def _samples(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    """A module that treats every sample alone."""
    dim, cut = gather(node.attrs["dim"]), node.attrs["cut"]
    return [ShardingRule(tuple(dim if place in cut else IDENTITY for place in range(len(shapes))), dim)]


def _softmax(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    return [rule for rule in _unary(node, shapes) if rule.post != gather(node.attrs["dim"])]


def _attention(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    return [ShardingRule((gather(k),) * 3, gather(k)) for k in range(len(shapes[0]) - 2)]


def _embedding(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    made = [ShardingRule((gather(k), IDENTITY), gather(k)) for k in range(len(shapes[0]))]
    return [*made, ShardingRule((IDENTITY, gather(1)), gather(len(shapes[0])))]


def _conv(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    made = [ShardingRule((gather(0), IDENTITY), gather(0))]
    if node.attrs.get("groups", 1) == 1:
        made += [ShardingRule((IDENTITY, gather(0)), gather(1)), ShardingRule((gather(1), gather(1)), REDUCE)]
    return made


def _pool(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    return _unary(node, shapes)[:2]


def _loss(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    """Summands of a sum or mean over samples; class scores are whole."""
    if len(shapes[0]) == len(shapes[1]):
        return [ShardingRule((gather(k), gather(k)), REDUCE) for k in range(len(shapes[0]))]
    places = [0, *range(2, len(shapes[0]))]
    return [ShardingRule((gather(k), gather(k - 1 if k else 0)), REDUCE) for k in places]


def _summed(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    gone, keep = node.attrs["dims"], node.attrs.get("keep", False)
    made = [ShardingRule((REDUCE,), REDUCE)]
    for k in range(len(shapes[0])):
        left = k if keep else k - sum(1 for d in gone if d < k)
        made.append(ShardingRule((gather(k),), REDUCE if k in gone else gather(left)))
    return made


def _concat(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    some = [k for k in range(len(node.shape)) if k != node.attrs["dim"]]
    return [
        *(ShardingRule((gather(k),) * len(shapes), gather(k)) for k in some),
        ShardingRule((REDUCE,) * len(shapes), REDUCE),
    ]


def _index(node: Node, shapes: Sequence[Shape]) -> list[ShardingRule]:
    """Parts are taken of some dimensions; the others stay, maybe at another place."""
    return [
        *(ShardingRule((gather(int(a)),), gather(b)) for a, b in node.attrs["stay"]),
        ShardingRule((REDUCE,), REDUCE),
    ]


_RULES: dict[str, Callable[[Node, Sequence[Shape]], list[ShardingRule]]] = {
    "linear": _linear, "bias": _bias, "unary": _unary, "scale": _scale, "dropout": _unary, "add": _add,
    "mul": _mul, "einsum": _einsum, "permute": _permute, "reshape": _reshape, "norm": _norm,
    "softmax": _softmax, "attention": _attention, "embedding": _embedding, "conv": _conv, "pool": _pool,
    "loss": _loss, "elementwise": _broadcast, "batch_norm": _batch_norm, "samples": _samples,
    "sum": _summed, "mean": _summed, "cat": _concat, "index": _index,
}  # fmt: skip


# -- where a dimension may be cut -------------------------------------------------------------


def granules(graph: Graph) -> dict[tuple[str, int], int]:
    """For every tensor and dimension, the number of elements that must stay together.

    Heads of attention, or the letters of a sample after flattening, must not be torn apart. Dimensions
    that some rule slices together have equally many such units, so that one rounding of the ratios fits
    them all."""
    nodes = graph.by_name()
    sizes = {(name, dim): 1 for name, node in nodes.items() for dim in range(len(node.shape))}
    ties = [tie for node in graph.nodes if not node.leaf for tie in _ties(node, nodes)]
    changed = True
    while changed:
        changed = False
        for tie in ties:
            changed |= _settle(tie, sizes, nodes)
    return sizes


def _ties(node: Node, nodes: dict[str, Node]) -> list[list[tuple[str, int]]]:
    shapes = [nodes[name].shape for name in node.inputs]
    ties = []
    for rule in rules_of(node, shapes):
        held = [(name, dim_of(p)) for name, p in zip(node.inputs, rule.pre, strict=True)]
        held.append((node.name, dim_of(rule.post)))
        ties.append([(name, dim) for name, dim in held if dim is not None])
    return [tie for tie in ties if len(tie) > 1]


def _settle(tie: list[tuple[str, int]], sizes: dict[tuple[str, int], int], nodes: dict[str, Node]) -> bool:
    """Give all the same number of units: the greatest that divides each one's."""
    units = [nodes[name].shape[dim] // sizes[name, dim] for name, dim in tie]
    common = units[0]
    for each in units[1:]:
        while common and each % common:
            common, each = each % common, common
    changed = False
    for name, dim in tie:
        size = nodes[name].shape[dim] // common
        changed |= size != sizes[name, dim]
        sizes[name, dim] = size
    return changed


def round_lengths(ratios: Sequence[float], units: int) -> list[int]:
    """How many of the units each device has: rounded down, then one more where most is missing."""
    lengths = [int(ratio * units + 1e-9) for ratio in ratios]
    while sum(lengths) < units:
        missing = [ratio - length / units for ratio, length in zip(ratios, lengths, strict=True)]
        lengths[missing.index(max(missing))] += 1
    while sum(lengths) > units:
        lengths[lengths.index(max(lengths))] -= 1
    return lengths
