"""Refuses graphs that use a tensor after it was changed in place: a program may hold it in several forms."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from paceline.errors import ConfigError

CHANGES = {operator.iadd, operator.imul, operator.isub, operator.itruediv, operator.ipow}
VIEWS = {
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "permute", "chunk",
    "split", "contiguous", "detach", "expand", "t", "view_as", operator.getitem,
}  # fmt: skip


def check_in_place(module: fx.GraphModule) -> None:
    """One sentence about the first such tensor."""
    roots: dict[fx.Node, fx.Node] = {}
    changed: dict[fx.Node, fx.Node] = {}
    for n in module.graph.nodes:
        for given in n.all_input_nodes:
            by = changed.get(roots.get(given, given))
            if by is not None:
                raise _used_again(given, by)
        source = n.args[0] if n.args and isinstance(n.args[0], fx.Node) else None
        if source is None:
            continue
        root = roots.get(source, source)
        if changes(n, module):
            if root.op == "get_attr":
                raise ConfigError(
                    f"the model changes its buffer {root.target!r} in its forward, which is not planned for."
                )
            changed[root] = n
        elif n.target in VIEWS:
            roots[n] = root


def changes(n: fx.Node, module: fx.GraphModule) -> bool:
    """Whether an operation changes its first argument."""
    if n.op == "call_module":
        return bool(getattr(module.get_submodule(str(n.target)), "inplace", False))
    if n.op == "call_method":
        name = str(n.target)
        return name.endswith("_") and not name.endswith("__")
    target: Any = n.target
    named = n.op == "call_function" and str(getattr(target, "__name__", "")).endswith("_")
    return target in CHANGES or named or n.kwargs.get("inplace") is True


def _used_again(given: fx.Node, by: fx.Node) -> ConfigError:
    return ConfigError(
        f"{given.name} is used again after {by.name} has changed it in place, which is not planned for. "
        "Compute a new tensor instead, such as x = x + y."
    )
