"""What a run of peers asks for at its start: also the copies that workers keep for those behind them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.protocols.settings import make_peer
from paceline.runtime.peer.kept_copies import KeptCopies
from paceline.runtime.peer.memory import Halves
from paceline.runtime.run import peer_start
from paceline.store.layout import Layout, describe
from paceline.store.vector import FlatVector


class CountedMemory:
    """Lends memory, and counts how often."""

    lent = 0

    def lend(self, whom: str) -> Halves:
        self.lent += 1
        return FlatVector([torch.zeros(1)]), FlatVector([torch.zeros(1)])


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_a_worker_as_far_ahead_as_it_may_be_keeps_the_copies_that_were_counted(ahead: int) -> None:
    """And a mixture, which is under way beside them."""
    memory = CountedMemory()
    kept = KeptCopies(memory)  # type: ignore[arg-type]
    for iteration in range(20):
        kept.room(iteration, oldest=max(0, iteration - ahead))
    assert make_peer("dpsgd", {"ahead": ahead}).copies == memory.lent + 1


@pytest.mark.parametrize("protocol", ["dpsgd", "local_sgd"])
def test_room_is_asked_for_every_copy_of_every_worker(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, copies = small_layout(), make_peer(protocol, {}).copies
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(peer_start, "check_room", lambda size, what: asked.append((size, what)))
    peer_start._check_memory(layout, 3, 0)
    peer_start._check_memory(layout, 3, copies)
    (before, _), (after, what) = asked
    assert after - before == 3 * copies * layout.weights_bytes
    assert ("copies of its model" in what) == (protocol == "dpsgd")


def small_layout() -> Layout:
    model = nn.Linear(64, 64)
    return describe(model, list(model.parameters()))
