"""One changed operator, comparison, constant or condition of a module, and how its functions get it."""

from __future__ import annotations

import ast
import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


class Mutant:
    """One place of one module, changed."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text())
        (change, self.line, self.what), self.function = places(self.tree)[number]
        change()

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.what}"

    @property
    def module(self) -> str:
        """Its dotted name."""
        return ".".join(self.path.relative_to(SOURCE).with_suffix("").parts)

    def take_effect(self) -> None:
        """Give all functions of the module, wherever they are held, the changed code."""
        importlib.import_module(self.module)
        new = dict(_codes(compile(self.tree, str(self.path), "exec")))
        for held in gc.get_objects():
            # Not isinstance: it asks for the class, which some objects of torch answer with a warning.
            if type(held) is FunctionType and held.__code__.co_filename == str(self.path):
                held.__code__ = new[held.__code__.co_qualname, held.__code__.co_firstlineno]


def _codes(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    yield (code.co_qualname, code.co_firstlineno), code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


Place = tuple[Any, int, str]
"""How to make a change, its line, and words for it."""


def places(tree: ast.AST) -> list[tuple[Place, int]]:
    """Every change that can be made, with the first line of its function: module constants are left alone."""
    found: list[tuple[Place, int]] = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            first = min(node.lineno for node in [function, *function.decorator_list])
            nodes = [node for statement in function.body for node in _inside(statement)]
            found += [(place, first) for node in nodes for place in _changes(node)]
    return found


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """This node and those below, without annotations, words of errors, named functions, and `strict=True`
    of a zip, which only guards against mistakes of our own."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Raise):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    yield node
    for name, child in ast.iter_fields(node):
        for inner in child if isinstance(child, list) else [child]:
            if isinstance(inner, ast.AST) and name != "annotation":
                yield from _inside(inner)


def _changes(node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Compare):
        yield from (_swap(node.ops, k, node) for k, op in enumerate(node.ops) if type(op) in OTHER)
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in OTHER:
        yield _swap(vars(node), "op", node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield _constant(node)
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Constant):
        yield _negated(node)


def _swap(holder: Any, key: Any, node: Any) -> tuple[Any, int, str]:
    old = holder[key]
    new = OTHER[type(old)]()

    def change() -> None:
        holder[key] = new

    return change, node.lineno, f"{type(old).__name__} -> {type(new).__name__}"


def _constant(node: ast.Constant) -> tuple[Any, int, str]:
    old: Any = node.value
    new = not old if isinstance(old, bool) else old + 1

    def change() -> None:
        node.value = new

    return change, node.lineno, f"{old!r} -> {new!r}"


def _negated(node: Any) -> tuple[Any, int, str]:
    def change() -> None:
        node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        ast.fix_missing_locations(node)

    return change, node.lineno, f"condition of {type(node).__name__.lower()} negated"
