"""What no plan of a batch size can beat: the knapsack without the surge, with operators that can be cut.

How much time a byte saves does not depend on the batch, so it is sorted once; a batch size then takes a look
into a table. Where communication is counted as hidden by computing it does depend on it; then computing
alone is the bound."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from paceline.plan.osdp.knapsack import below, corners, slope
from paceline.plan.osdp.options import Option, OsdpCosts
from paceline.plan.profile import ModelProfile

ANY = 2**63
"""A surge that all options are below."""


class Bounds:
    """Of one model, cluster and set of ways."""

    def __init__(self, options: Sequence[Sequence[Option]], profile: ModelProfile, costs: OsdpCosts) -> None:
        """`options`: of every operator, for the batch of `costs`."""
        made = [corners(below(each, ANY)) for each in options]
        self._operators, self._batch = profile.operators, costs.batch
        self._memory = sum(each[0].memory for each in made)
        self._activations = sum(op.activation_bytes for op in profile.operators)
        self._each_s = sum(op.per_sample_s for op in profile.operators)
        if costs.overlap:
            self._seconds = sum(op.fixed_s for op in profile.operators)
            steps: list[tuple[float, float]] = []
        else:
            self._seconds = sum(each[0].seconds for each in made) - self._each_s * costs.batch
            steps = [(slope(a, b), b.memory - a.memory) for each in made for a, b in pairwise(each)]
        steps.sort(reverse=True)
        sizes = np.array([0.0, *(size for _, size in steps)])
        saved = np.array([0.0, *(price * size for price, size in steps)])
        self._filled, self._saved = np.cumsum(sizes), np.cumsum(saved)

    def _room(self, batch: int, room: int) -> float:
        """Bytes left beside the least that this batch takes; a byte per operator for rounding."""
        least = self._memory + (batch - self._batch) * self._activations
        return room - least + len(self._operators)

    def fits(self, batch: int, room: int) -> bool:
        """Whether a plan may fit; False is certain."""
        return self._room(batch, room) >= 0

    def rate(self, batch: int, room: int) -> float:
        """Samples per second and device that no plan exceeds."""
        saved = float(np.interp(self._room(batch, room), self._filled, self._saved))
        seconds = self._seconds + self._each_s * batch - saved
        return batch / seconds if seconds > 0 else float("inf")
