"""What the owner decides for workers that exchange among themselves."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import pytest

from paceline.errors import ConfigError
from paceline.protocols import PEERS
from paceline.protocols.core.meeting import Call
from paceline.protocols.core.operations import Exchange, Rule
from paceline.runtime.meeting.collective import CollectiveGroups
from paceline.runtime.peer.collective.carrier import CollectiveCarrier
from paceline.store.vector import FlatVector

EVERYBODY = tuple(range(6))


def test_a_group_once_connected_stays_and_further_ones_exchange_by_pairs() -> None:
    circles = CollectiveGroups(EVERYBODY, most=4)
    pairs = list(combinations(EVERYBODY, 2))
    chosen = [circles.among(Call("average", pair), pair) for pair in pairs]
    assert chosen[:3] == pairs[:3], "together with everybody these are four"
    assert set(chosen[3:]) == {()}
    assert [circles.among(Call("average", pair), pair) for pair in pairs] == chosen
    assert circles.among(Call("average"), EVERYBODY) == EVERYBODY


def test_one_worker_alone_needs_no_group_unless_it_has_begun() -> None:
    circles = CollectiveGroups(EVERYBODY)
    assert circles.among(Call("average"), (2,)) == ()
    assert circles.among(Call("average"), (2,), begun=True) == EVERYBODY
    assert circles.among(Call("average", lane=3), (2,)) == EVERYBODY


def test_an_operation_that_needs_shared_memory_is_refused_by_name() -> None:
    carrier = object.__new__(CollectiveCarrier)
    carrier._peer = SimpleNamespace(protocol=PEERS["allreduce"]())  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"AllReduce uses Exchange, .* Use --fabric shared"):
        carrier.trade(Exchange(FlatVector([]), Rule.GOSSIP, 0))
