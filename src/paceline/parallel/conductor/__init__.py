"""The process that keeps the books of a run on a mesh."""
