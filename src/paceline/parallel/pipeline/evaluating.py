"""Evaluation of a pipeline: the lead has a model that looks whole, whose parts the other stages compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.parallel.pipeline.blocks import Row
from paceline.parallel.pipeline.ways import PayloadKind, Sender, Way, receive


class Lead(nn.Module):
    """The whole model, as the lead calls it: its own stage is here, the others are asked."""

    def __init__(self, row: Row, ranks: Sequence[int]) -> None:
        super().__init__()
        self.first = row
        self._last = ranks[-1]
        self._next = Sender(Way.EVALUATED, ranks[1], 1) if len(ranks) > 1 else None
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Through all stages."""
        out: Tensor = self.first(x)
        if self._next is None:
            return out
        self._calls += 1
        self._next.send(self._calls, out.detach())
        _, _, answer = receive(self._last, 2 * Way.RESULTS)
        assert answer is not None
        return answer

    def end(self) -> None:
        """The others need not wait for more."""
        if self._next is not None:
            self._next.end()
            self._next.flush()


@torch.no_grad()
def serve(row: Row, ranks: Sequence[int], stage: int) -> None:
    """Compute a stage's part of whatever the lead asks for, until it has done."""
    last = stage == len(ranks) - 1
    way, whom = (Way.RESULTS, ranks[0]) if last else (Way.EVALUATED, ranks[stage + 1])
    sender = Sender(way, whom, 1)
    while True:
        kind, token, x = receive(ranks[stage - 1], 2 * Way.EVALUATED)
        if kind is PayloadKind.END:
            if not last:
                sender.end()
            sender.flush()
            return
        assert x is not None
        sender.send(token, row(x))
