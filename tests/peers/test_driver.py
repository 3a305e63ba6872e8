"""One iteration, told as operations: what a protocol may yield, and what happens when workers disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.errors import RunError
from paceline.protocols.core.meeting import Call, Gathered, Meeting
from paceline.protocols.core.operations import Agree, Average, Compute, How, Rule, Step, Steps
from paceline.protocols.core.peer import Me, Peer
from paceline.protocols.core.topology import Topology
from support.peers import Crew
from support.problems import noisy, nothing


@dataclass(frozen=True)
class Idle(Peer):
    def iteration(self, me: Me) -> Steps:
        yield Agree(1, How.SUM)


@dataclass(frozen=True)
class Greedy(Peer):
    def iteration(self, me: Me) -> Steps:
        yield Compute()
        yield Compute()


@dataclass(frozen=True)
class Split(Peer):
    """Rank 0 averages, the others vote."""

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        if me.rank == 0:
            yield Average(gradient)
        else:
            yield Agree(1, How.ANY)


@dataclass(frozen=True)
class Hoarder(Peer):
    """Uses an answer after the next joint operation."""

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        mean = yield Average(gradient)
        yield Average(me.parameters)
        yield Step(mean)


@dataclass(frozen=True)
class Lopsided(Peer):
    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        yield Average(gradient if me.rank else gradient.clone(), group=(0, 1) if me.rank else None)


@pytest.mark.parametrize(("protocol", "words"), [(Idle(), "never"), (Greedy(), "twice")])
def test_an_iteration_computes_exactly_once(protocol: Peer, words: str) -> None:
    with pytest.raises(RunError, match=rf"computed {words}.* in iteration 1\. Yield exactly one"):
        Crew(protocol, 2, nothing).run(1)


def test_workers_in_different_operations_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(
        RunError, match=r"rank \d is in (Average|Agree).*rank \d in (Average|Agree).*wait for each other"
    ):
        Crew(Split(), 3, nothing).run(1)


def test_workers_that_name_different_groups_are_named() -> None:
    with pytest.raises(RunError, match=r"among \[0, 1\]"):
        Crew(Lopsided(), 2, nothing).run(1)


def test_what_an_operation_answered_is_spoilt_by_the_next_one() -> None:
    crew = Crew(Hoarder(), 2, noisy(0)).run(1)
    assert torch.isnan(crew.parameters()[0]).all()


def test_nobody_waits_for_one_that_left_and_what_a_dead_one_brought_counts() -> None:
    meeting = Meeting()
    for rank in range(3):
        meeting.join(rank)
    assert meeting.arrive(0, Call("average", weight=1.0)) == []
    assert meeting.arrive(1, Call("average", weight=3.0)) == []
    assert meeting.leave(1) == []
    (done,) = meeting.leave(2)
    assert done.receivers == (0,)
    assert done.rows == {0: {0: 0.25, 1: 0.75}}
    assert meeting.active == (0,)


def test_weights_that_are_all_zero_count_the_same() -> None:
    meeting = Meeting()
    for rank in (4, 7):
        meeting.join(rank)
    meeting.arrive(7, Call("average", weight=0.0))
    (done,) = meeting.arrive(4, Call("average", weight=0.0))
    assert done.rows[4] == {4: 0.5, 7: 0.5}


@pytest.mark.parametrize(
    ("how", "values", "outcome"),
    [
        (How.ANY, (0, 1, 0), True),
        (How.ANY, (0, 0, 0), False),
        (How.ALL, (1, 1, 0), False),
        (How.SUM, (1, 2, 4), 7),
        (How.MIN, (3, 1, 2), 1),
        (How.MAX, (3, 1, 2), 3),
    ],
)
def test_agreeing(how: How, values: tuple[int, ...], outcome: float) -> None:
    meeting = Meeting()
    for rank in range(3):
        meeting.join(rank)
    done = [meeting.arrive(rank, Call("agree", value=values[rank], how=how)) for rank in (2, 0, 1)]
    assert done[:2] == [[], []]
    assert done[2][0].outcome == outcome


def test_a_meeting_says_whom_a_worker_waits_for() -> None:
    meeting = Meeting()
    for rank in range(4):
        meeting.join(rank)
    meeting.arrive(0, Call("average", size_bytes=8))
    meeting.arrive(2, Call("average", size_bytes=8))
    meeting.arrive(1, Call("average", group=(1, 3), size_bytes=8, lane=1))
    assert meeting.missing(0) == meeting.missing(2) == [1, 3]
    assert meeting.missing(1, lane=1) == [3]
    assert meeting.missing(1) is meeting.missing(3) is meeting.missing(0, lane=1) is None
    meeting.leave(3)
    assert meeting.missing(0) == [1]


def test_who_mixes_waits_for_those_whose_vectors_it_takes() -> None:
    meeting = Meeting()
    for rank in range(5):
        meeting.join(rank)
    meeting.arrive(0, Call("mix", topology=Topology("ring"), size_bytes=8, ahead=1))
    assert meeting.missing(0) == [1, 4]
    meeting.arrive(4, Call("mix", topology=Topology("ring"), size_bytes=8, ahead=1))
    assert (meeting.missing(0), meeting.missing(4)) == ([1], [3])


def test_reading_a_cell_sends_nothing_and_writing_brings_nothing_back() -> None:
    travels = {rule: rule.travels(8) for rule in Rule}
    assert travels.pop(Rule.READ) == (0, 8)
    assert travels.pop(Rule.WRITE) == (8, 0)
    assert set(travels.values()) == {(8, 8)}


def test_a_protocol_that_says_nothing_of_itself_meets_in_every_iteration_and_keeps_nothing() -> None:
    idle = Idle()
    assert (idle.sends_ahead, idle.free, idle.apart, idle.copies) == (False, False, False, 0)
    assert (idle.repeats, idle.plain_alone, idle.resumable) == (True, True, True)


def average_of(sent_bytes: int, kind: Any = "average", workers: int = 3) -> Gathered:
    row = dict.fromkeys(range(workers), 1 / workers)
    receivers = tuple(range(workers))
    return Gathered(kind, receivers, dict.fromkeys(receivers, row), size_bytes=8, sent_bytes=sent_bytes)


def test_of_compressed_vectors_come_those_of_the_others_or_the_average_whichever_is_less() -> None:
    assert average_of(8).answer_bytes is average_of(3, "agree").answer_bytes is None
    assert average_of(3).answer_bytes == 6
    assert average_of(5).answer_bytes == 8
    assert average_of(1, "mix").answer_bytes == 8
    assert average_of(3).given_bytes == Call("average", sent_bytes=3).given_bytes == 3
    assert average_of(3, "agree").given_bytes == Call("agree", sent_bytes=3).given_bytes > 3


def test_an_operation_is_told_by_its_group_and_its_bytes() -> None:
    assert str(Call("average", group=(0, 2), size_bytes=8)) == "Average among [0, 2] of 8 bytes"
    assert str(Call("agree", size_bytes=8)) == "Agree"


def test_what_was_brought_to_a_mixture_is_needed_until_the_last_is_answered() -> None:
    meeting = Meeting()
    for rank in range(3):
        meeting.join(rank)
    call = Call("mix", topology=Topology("complete"), size_bytes=8, ahead=1)
    gathered = [each for rank in range(3) for each in meeting.arrive(rank, call)]
    assert [each.last for each in gathered] == [False, False, True]
