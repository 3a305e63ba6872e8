"""The code's structure: what holds for all of its files."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent


def test_no_two_classes_have_one_name() -> None:
    """Who searches for a name, or reads it in a traceback, finds one class."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 500, f"{ROOT} does not hold the code"
    shared = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not shared, "these classes share a name, rename all but one:\n" + "\n".join(shared)
