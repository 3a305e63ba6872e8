"""A model cut into stages, one worker each, that do not wait for each other: pipelines with staleness.

pipe, loader = pipeline(pace, mesh, model, optimizer, loader, loss=F.cross_entropy)
for x, y in loader:
    pipe.step(x, y)
"""

from __future__ import annotations

from typing import Any


def pipeline(*args: Any, **named: Any) -> Any:
    """Cut a model into the stages of a mesh; see `paceline.parallel.pipeline.cutting.pipeline`."""
    from paceline.parallel.pipeline.cutting import pipeline

    return pipeline(*args, **named)
