"""A run whose store lies in portions, as far as its checkpoints are concerned.

What is here is copied at once. Each holder copies its portion when it has carried out the same orders, and
sends it while training goes on; who writes the checkpoint waits for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.runtime.messages.portions import PortionPlan
from paceline.runtime.run.member import Member
from paceline.runtime.run.run import Run, run_state
from paceline.store.disk.checkpoint import Snapshot, buffers_of, pack
from paceline.store.spread.portions import FirstPortion, to_whole
from paceline.store.spread.slices import Slices

State = tuple[dict[str, Tensor], dict[str, Any]]


class PortionRun(Run):
    """Its store is the first portion; the others are sent for."""

    def __init__(
        self,
        run: Run,
        store: FirstPortion,
        plan: PortionPlan,
        slices: Slices,
        arrived: Callable[[], State],
    ) -> None:
        """`arrived` waits for the portions that were asked for, and gives their optimizers' state."""
        super().__init__(run.ledger, store, run.weights, run.shared, run.clocks)
        self.after_step = run.after_step
        self._plan, self._slices, self._arrived = plan, slices, arrived
        self.wanted: memoryview | None = None
        """Where all portions of the weights are to be put, as they are after the next order."""

    def take(self, lead: Member) -> Callable[[], Snapshot]:
        """What is here, now; the rest is to be asked for with the next order."""
        plan, slices, layout = self._plan, self._slices, self._slices.whole
        memory = bytearray(layout.weights_bytes)
        weights = torch.frombuffer(memory, dtype=torch.uint8)
        for start, stop in plan.first_spans:
            weights[start:stop].copy_(self.weights.bytes[start:stop])
        own = self.store.export()
        state = run_state(self.ledger, self.store, None, self.shared)
        state = msgspec.structs.replace(state, digest=layout.digest())
        buffers = buffers_of(layout, lead.segment.bytes if lead.segment else None)
        self.wanted = memoryview(memory)

        def whole() -> Snapshot:
            parts = zip(own, self._arrived(), strict=True)
            merged = (to_whole(plan.optimizer, plan.portions[0], mine) | theirs for mine, theirs in parts)
            tensors, values = slices.to_whole(*merged)
            views = zip(layout.parameters, layout.weight_views(weights), strict=True)
            model = {slot.name: view.contiguous().clone() for slot, view in views}
            return pack(model | buffers, tensors, values, state)

        return whole
