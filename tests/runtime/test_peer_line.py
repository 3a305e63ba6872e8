"""What travels of a peer on another host is what lies in the place it names, and only memory that it has."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.errors import RunError
from paceline.fabric.segment import Segment
from paceline.protocols.meeting import Call
from paceline.protocols.parts import Part
from paceline.protocols.peer import Rule
from paceline.runtime import messages as m
from paceline.runtime.guests import RemoteHost
from paceline.runtime.host_messages import HOST, WORKER, FromHost, Lend
from paceline.runtime.places import COMMON, FIRST_LENT, MOST_LENT, OWN, SEGMENT, WEIGHTS, Places
from paceline.runtime.remote_line import Heard
from paceline.store.cutting import cut_of
from paceline.store.layout import Layout, describe
from paceline.store.optimizers import OptimizerSpec
from paceline.store.replicas import BUFFERS, GRADIENTS, LENT, PARAMETERS, Replica, answer_bytes

Memories = dict[int, Tensor]


class Mixed(nn.Module):
    """Two types of numbers, buffers, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(3, 5), nn.BatchNorm1d(5)
        self.two = nn.Linear(5, 2).double()
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)


@pytest.fixture(scope="module")
def layout() -> Layout:
    model = Mixed()
    return describe(model, [p for p in model.parameters() if p.requires_grad])


def memories(layout: Layout, fill: int) -> Memories:
    sizes = {SEGMENT: layout.segment_bytes, WEIGHTS: layout.weights_bytes}
    sizes |= dict.fromkeys((COMMON, OWN, FIRST_LENT, FIRST_LENT + 1), answer_bytes(layout))
    return {memory: torch.full((size,), fill, dtype=torch.uint8) for memory, size in sizes.items()}


def replica(layout: Layout, all_of_them: Memories) -> Replica:
    seen = Replica(layout, all_of_them[WEIGHTS], all_of_them[SEGMENT], all_of_them[OWN])
    seen.lend(all_of_them[FIRST_LENT])
    seen.lend(all_of_them[FIRST_LENT + 1])
    return seen


PLACES = [PARAMETERS, GRADIENTS, BUFFERS, *range(LENT, LENT + 4)]


@pytest.mark.parametrize("place", PLACES)
def test_the_stretches_of_a_place_are_its_vector(layout: Layout, place: int) -> None:
    here, there = memories(layout, 0), memories(layout, 1)
    for memory, start, stop in Places(layout).of(place):
        here[memory][start:stop] = there[memory][start:stop]
    for mine, theirs in zip(
        replica(layout, here).parts(place), replica(layout, there).parts(place), strict=True
    ):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    others = [each for each in (PARAMETERS, GRADIENTS, LENT, LENT + 2) if each != place]
    assert not any(bool(part.any()) for other in others for part in replica(layout, here).parts(other))


@pytest.mark.parametrize("place", [PARAMETERS, GRADIENTS, LENT, LENT + 2])
@pytest.mark.parametrize("tensors", [(0,), (1, 2), (0, 3), (2, 4, 5)])
def test_the_stretches_of_some_tensors_are_those_and_no_others(
    layout: Layout, place: int, tensors: tuple[int, ...]
) -> None:
    here, there, part = memories(layout, 0), memories(layout, 1), Part(tensors, 0)
    for memory, start, stop in Places(layout).of(place, part):
        here[memory][start:stop] = there[memory][start:stop]
    cut = cut_of(layout)
    for tensor in range(len(layout.trained)):
        pieces = cut.pieces(replica(layout, here).parts(place), Part((tensor,), 0))
        assert all(bool(piece.view(torch.uint8).any()) == (tensor in tensors) for piece in pieces)


class Elsewhere:
    """A host with one peer, as the run's host knows it."""

    def __init__(self, layout: Layout) -> None:
        self.heard: list[Heard] = []
        config = RunConfig(run="", folder="", workers=2)
        self.host = RemoteHost("there", self.heard.append, lambda: None, (1,), config)
        self.says(m.Register(layout, OptimizerSpec("SGD", ()), None, True))
        sizes = (layout.segment_bytes, layout.weights_bytes, answer_bytes(layout), answer_bytes(layout))
        given = [Segment.create(size, "test") for size in sizes]
        self.host.lines[0].send(m.Ready(False, 0, 0, None), tuple(each.fd for each in given))
        for each in given:
            each.close_fd()

    def says(self, message: m.FromWorker) -> None:
        self.host.arrived(0, WORKER, msgspec.msgpack.encode(message))

    def tells(self, message: FromHost) -> None:
        self.host.arrived(0, HOST, msgspec.msgpack.encode(message))


AVERAGE: dict[str, Any] = {"kind": "average", "size_bytes": 8}


@pytest.mark.parametrize(
    "message",
    [
        m.Meet(Call(**AVERAGE), place=LENT),
        m.Meet(Call(**AVERAGE), place=-1),
        m.Meet(Call(**AVERAGE, lane=1), into=LENT + 1),
        m.Meet(model=LENT),
        m.Meet(Call(**AVERAGE, part=Part((99,), 8))),
        m.Meet(Call(**AVERAGE, part=Part((-1,), 8))),
        m.Meet(cell=2),
        m.Meet(trade=m.Trade(Rule.GOSSIP, 0, 2, 1.0)),
        m.Meet(trade=m.Trade(Rule.ELASTIC, -2, None, 1.0)),
    ],
)
def test_what_does_not_exist_is_refused_before_it_is_looked_for(layout: Layout, message: m.Meet) -> None:
    elsewhere = Elsewhere(layout)
    before = len(elsewhere.heard)
    with pytest.raises(RunError, match="does not exist"):
        elsewhere.says(message)
    assert len(elsewhere.heard) == before


def test_what_it_lends_is_handed_on_with_its_next_word(layout: Layout) -> None:
    elsewhere = Elsewhere(layout)
    elsewhere.tells(Lend())
    elsewhere.says(m.Meet(Call(**AVERAGE), place=LENT + 1))
    handed = elsewhere.heard[-1].fds
    assert len(handed) == 1
    there = Segment(handed[0], answer_bytes(layout))
    there.close_fd()
    elsewhere.host.place(0, FIRST_LENT, 3, 2)[:] = b"ab"
    assert bytes(there.map[3:5]) == b"ab"


@pytest.mark.parametrize("memory", [COMMON, OWN, FIRST_LENT, 255])
def test_answers_and_what_was_not_lent_cannot_be_written_from_elsewhere(layout: Layout, memory: int) -> None:
    with pytest.raises(RunError, match="not agreed on"):
        Elsewhere(layout).host.place(0, memory, 0, 1)


def test_nobody_lends_without_end(layout: Layout) -> None:
    elsewhere = Elsewhere(layout)
    for _ in range(MOST_LENT):
        elsewhere.tells(Lend())
    with pytest.raises(RunError, match=f"more than {MOST_LENT} memories"):
        elsewhere.tells(Lend())
