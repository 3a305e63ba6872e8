"""Layers split by output rows over the axis `model` of a mesh: `parallelize(model, mesh)`."""

from paceline.parallel.layers.parallelize import parallelize

__all__ = ["parallelize"]
