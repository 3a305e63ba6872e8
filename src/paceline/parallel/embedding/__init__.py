"""Embedding tables on a mesh: split inside a group of workers, copied over groups (2D sparse parallelism).

tables = EmbeddingTables(mesh, [Table("user", 1_000_000, 64)], budget_bytes=2_000_000_000)
rows = RowWiseAdagrad(tables.weights, lr=0.05)
tables.trained_by(rows)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

WHERE = {"EmbeddingTables": "tables", "RowWiseAdagrad": "rowwise", "Table": "planner"}


def __getattr__(name: str) -> Any:
    """Load what is asked for: who only lists protocols needs no torch."""
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{WHERE[name]}"), name)
