"""What travels of a peer on another host is what lies in the place it names, and only memory that it has."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.errors import RunError
from paceline.fabric.channel import Channel
from paceline.fabric.segment import Segment
from paceline.protocols.core.meeting import Call
from paceline.protocols.core.operations import Rule
from paceline.protocols.core.parts import Part
from paceline.protocols.rules.compression import Compression
from paceline.runtime.hosts.arrivals import Arrivals
from paceline.runtime.hosts.local_worker import LocalWorker
from paceline.runtime.hosts.remote_hosts import RemoteHost
from paceline.runtime.hosts.remote_worker import RemoteEvent
from paceline.runtime.messages import workers as m
from paceline.runtime.messages.hosts import HOST, WORKER, FromHost, LendMemory, SumVectors, Term, VectorStaged
from paceline.runtime.messages.memories import (
    COMMON,
    FIRST_LENT,
    MOST_LENT,
    OWN,
    SEGMENT,
    STAGED,
    WEIGHTS,
    Places,
)
from paceline.store.compression.codecs import encode
from paceline.store.compression.wire_form import write, written_bytes
from paceline.store.cutting import cut_of
from paceline.store.layout import Layout, describe
from paceline.store.optimizers import OptimizerSpec
from paceline.store.replicas import (
    BUFFERS,
    GRADIENTS,
    LENT,
    PARAMETERS,
    Replica,
    Summing,
    answer_bytes,
    parameter_parts,
)

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

    def __init__(self, layout: Layout, compress: str = "none") -> None:
        self.heard: list[RemoteEvent] = []
        config = RunConfig(run="", folder="", workers=2, compress=compress)
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
    elsewhere.tells(LendMemory())
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
        elsewhere.tells(LendMemory())
    with pytest.raises(RunError, match=f"more than {MOST_LENT} memories"):
        elsewhere.tells(LendMemory())


# -- compressed ---------------------------------------------------------------------------------------


def squeezed(layout: Layout, seed: int) -> tuple[bytes, list[Tensor]]:
    """A vector like the parameters, compressed, and what arrives of it."""
    drawn = torch.Generator().manual_seed(seed)
    like = parameter_parts(layout, torch.zeros(layout.weights_bytes, dtype=torch.uint8))
    flats = [torch.randn(part.numel(), generator=drawn).to(part.dtype) for part in like]
    encoded = [encode(Compression("int8"), flat, wired=True) for flat in flats]
    pieces = [(each.decoded.numel(), each.wire) for each in encoded]
    memory = torch.zeros(written_bytes(pieces), dtype=torch.uint8)
    write(pieces, memory)
    return memory.numpy().tobytes(), [each.decoded for each in encoded]


def test_a_compressed_vector_is_put_where_its_worker_names_it(layout: Layout) -> None:
    elsewhere, (data, arrives) = Elsewhere(layout, "int8"), squeezed(layout, 0)
    elsewhere.tells(LendMemory())
    elsewhere.tells(VectorStaged(len(data)))
    elsewhere.host.place(0, STAGED, 0, len(data))[:] = data
    elsewhere.says(m.Meet(Call(**AVERAGE), place=LENT, packed=len(data)))
    there = Segment(elsewhere.heard[-1].fds[0], answer_bytes(layout))
    there.close_fd()
    for got, sent in zip(parameter_parts(layout, there.bytes), arrives, strict=True):
        assert torch.equal(got, sent)
    with pytest.raises(RunError, match="not agreed on"):
        elsewhere.host.place(0, STAGED, 0, 1)


@pytest.mark.parametrize(
    ("staged", "message"),
    [
        (None, m.Meet(Call(**AVERAGE), place=LENT, packed=8)),
        (8, m.Meet(Call(**AVERAGE), place=LENT, packed=16)),
        (8, m.Meet(Call(**AVERAGE), place=LENT)),
        (8, m.Meet(Call(**AVERAGE), place=LENT, packed=-8)),
        (8, m.Meet(Call(**AVERAGE), place=PARAMETERS, packed=8)),
        (8, m.Meet(Call(**AVERAGE), place=LENT + 1, packed=8)),
        (8, m.Meet(Call("agree"), place=LENT, packed=8)),
        (8, m.Meet(place=LENT, packed=8)),
        (8, m.Meet(Call(**AVERAGE), place=LENT, packed=8)),
    ],
)
def test_a_compressed_vector_that_was_not_sent_or_is_none_is_refused(
    layout: Layout, staged: int | None, message: m.Meet
) -> None:
    elsewhere = Elsewhere(layout, "int8")
    elsewhere.tells(LendMemory())
    if staged is not None:
        elsewhere.tells(VectorStaged(staged))
    before = len(elsewhere.heard)
    with pytest.raises(RunError, match=r"that was not sent|within a header"):
        elsewhere.says(message)
    assert len(elsewhere.heard) == before


@pytest.mark.parametrize("size", [0, -1, 1 << 40])
def test_no_more_room_is_made_than_a_vector_needs(layout: Layout, size: int) -> None:
    with pytest.raises(RunError, match=f"a compressed vector of {size} bytes"):
        Elsewhere(layout, "int8").tells(VectorStaged(size))
    with pytest.raises(RunError, match=f"compressed vectors of {size} bytes"):
        Host(layout).arriving.stage(Host(layout).workers[0], VectorStaged(size))


class Host:
    """A host with two peers, as it knows them itself."""

    def __init__(self, layout: Layout) -> None:
        self.workers, self.memory = [], bytearray(answer_bytes(layout))
        ours, theirs = socket.socketpair()
        for lane in range(2):
            self.workers.append(LocalWorker(lane, Channel(ours), 0))
            self.workers[-1].layout, self.workers[-1].compress = layout, "int8"
        for each in (ours, theirs):  # nobody says anything
            each.close()
        self.arriving = Arrivals(self.workers, lambda lane, what, start, length: memoryview(self.memory))


def test_a_host_adds_up_what_it_has_and_what_it_is_sent(layout: Layout) -> None:
    here, (mine, first), (sent, second) = Host(layout), squeezed(layout, 1), squeezed(layout, 2)
    here.workers[1].packed[3] = bytearray(mine)
    here.arriving.stage(here.workers[0], VectorStaged(len(sent)))
    staged = here.workers[0].staged
    assert staged is not None
    staged.map[:] = sent
    terms = [Term(0.25, None, len(sent)), Term(0.75, 1, len(mine))]
    here.arriving.add_up(here.workers[0], SumVectors(0, OWN, None, 3, terms))
    expected = [torch.empty_like(part) for part in first]
    Summing(fused=False).add_up([(second, 0.25), (first, 0.75)], [expected])
    memory = torch.frombuffer(here.memory, dtype=torch.uint8)
    for got, part in zip(parameter_parts(layout, memory), expected, strict=True):
        assert torch.equal(got, part)


@pytest.mark.parametrize(
    "terms",
    [[Term(1.0, 0, 8)], [Term(1.0, 2, 8)], [Term(1.0, -1, 8)], [Term(1.0, None, 8)], [Term(1.0, 1, 9)]],
)
def test_a_host_adds_up_nothing_that_is_not_there(layout: Layout, terms: list[Term]) -> None:
    here = Host(layout)
    here.workers[1].packed[3] = bytearray(8)
    with pytest.raises(RunError, match=r"has brought nothing|a summand of"):
        here.arriving.add_up(here.workers[0], SumVectors(0, OWN, None, 3, terms))
