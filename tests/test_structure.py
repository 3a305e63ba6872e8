"""The code's structure: what holds for all of its files."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import paceline
import paceline_bench

PACKAGES = [Path(str(package.__file__)).parent for package in (paceline, paceline_bench)]


def test_no_two_classes_have_one_name() -> None:
    """Who searches for a name, or reads it in a traceback, finds one class."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    assert len(places) > 500, f"{PACKAGES} do not hold the code"
    shared = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not shared, "these classes share a name, rename all but one:\n" + "\n".join(shared)
