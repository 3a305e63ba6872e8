"""Embedding tables on a mesh: split inside a group of workers, copied over groups (2D sparse parallelism)."""

from paceline.parallel.embedding.planner import Table
from paceline.parallel.embedding.rowwise import RowWiseAdagrad
from paceline.parallel.embedding.tables import EmbeddingTables

__all__ = ["EmbeddingTables", "RowWiseAdagrad", "Table"]
