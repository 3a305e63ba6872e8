"""Layers split by their outputs over the axis `model` of a mesh.

model = parallelize(model, mesh)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
"""

from __future__ import annotations

from typing import Any


def parallelize(model: Any, mesh: Any) -> Any:
    """Split a model's layers; see `paceline.parallel.layers.splitting.parallelize`."""
    from paceline.parallel.layers.splitting import parallelize

    return parallelize(model, mesh)
