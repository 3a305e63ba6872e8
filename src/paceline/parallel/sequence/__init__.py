"""Samples whose sequences are cut over workers, and cut otherwise on the way: dynamic sequence parallelism.

x = split(x, dim=1, line=line)      # every worker has some frames of [batch, time, space, width]
x = switch(x.map(spatial), dim=2)   # attends over space; then every worker has some places
x = gather(x.map(temporal))         # attends over time; then all have everything
"""

from __future__ import annotations

from paceline.parallel.sequence.layouts import layouts
from paceline.parallel.sequence.line import Line
from paceline.parallel.sequence.parallelize import parallelize
from paceline.parallel.sequence.sharded import Sharded, gather, mean, split, switch

__all__ = ["Line", "Sharded", "gather", "layouts", "mean", "parallelize", "split", "switch"]
