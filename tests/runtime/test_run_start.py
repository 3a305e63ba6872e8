"""What a run takes of the memory of the host where its store is."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch import nn

from paceline.fabric.channel import Channel
from paceline.fabric.segment import Segment
from paceline.runtime.messages.workers import Register
from paceline.runtime.run.equipment import equip, memory_needed
from paceline.runtime.run.member import Member
from paceline.store.layout import Layout, describe
from paceline.store.optimizers import OptimizerSpec, describe_optimizer
from paceline.store.parameters import ParameterStore
from paceline.store.spread.portions import Portion, cut

PAGES = 8 * 4096
"""A span that begins or ends within a page takes all of it."""


class Elsewhere:
    """The way to a worker on another host."""

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@pytest.fixture
def near() -> Iterator[Channel]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours)


def model() -> tuple[Layout, OptimizerSpec]:
    """Four parameters of a megabyte each, something that is not trained, and a buffer."""
    network = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)), nn.BatchNorm1d(4096))
    trained = [p for p in network.parameters() if p.dim() == 2]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    return describe(network, trained), describe_optimizer(
        optimizer, {id(p): i for i, p in enumerate(trained)}
    )


def taken(*segments: Segment | None) -> int:
    """Bytes of memory that the kernel has given for these."""
    return sum(os.fstat(segment.fd).st_blocks * 512 for segment in segments if segment is not None)


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_counted_before_a_run_is_what_its_workers_then_take(
    near: Channel, shared: bool, hosts: int
) -> None:
    layout, spec = model()
    portion: Portion | None = cut(layout, hosts)[0] if hosts > 1 else None
    weights = Segment.create(layout.weights_bytes, "weights")
    weights.bytes.fill_(1)
    store = ParameterStore(layout, spec, weights.bytes)
    initial = Segment.create(layout.weights_bytes + layout.segment_bytes, "initial values")
    members = [Member(0, near, 1), Member(1, Elsewhere(), 1), Member(2, Elsewhere(), 1)]
    for member in members:
        member.registered = Register(layout, spec, None)
        equip(member, store, initial, shared, {}, portion)
        pushes(member, layout, portion if member.far else None)
    counted = memory_needed(layout, members, shared, portion)
    held = taken(weights, *(x.segment for x in members), *(x.weights for x in members))
    assert counted <= held <= counted + PAGES * 2 * len(members)
    assert (counted < memory_needed(layout, members, shared, None)) is (hosts > 1)


def pushes(member: Member, layout: Layout, portion: Portion | None) -> None:
    """What arrives of its gradients."""
    assert member.segment is not None
    start, stop = (0, layout.gradient_end) if portion is None else portion.gradients
    member.segment.bytes[start:stop].fill_(1)
