"""The books of a peer run: the answered go on, and a version is an iteration that all have completed."""

from __future__ import annotations

from paceline.protocols import Flush
from paceline.protocols.core.pacer import Pacer
from paceline.protocols.core.peer_books import PeerBooks


def running(workers: int) -> tuple[PeerBooks, Pacer]:
    books = PeerBooks()
    pacer = Pacer(books)
    for rank in range(workers):
        pacer.join(rank, 0.0)
    return books, pacer


def test_a_version_is_an_iteration_that_all_have_completed() -> None:
    books, pacer = running(2)
    versions = []
    for rank in (0, 0, 1, 1, 1, 0):
        books.answered.add(rank)
        decision = pacer.push(rank, 1.0)
        versions.append((decision.version, decision.flush))
        assert decision.release == (rank,)
    mean = Flush.MEAN
    assert versions == [(0, None), (0, None), (1, mean), (2, mean), (2, None), (3, mean)]


def test_only_who_was_answered_goes_on_and_only_once() -> None:
    books, pacer = running(2)
    assert pacer.push(0, 1.0).release == ()
    books.answered.update((0, 1))
    assert pacer.push(1, 2.0).release == (0, 1)
    assert pacer.push(0, 3.0).release == ()


def test_when_the_last_worker_leaves_nothing_is_completed() -> None:
    books, pacer = running(1)
    books.answered.add(0)
    assert pacer.push(0, 1.0).version == 1
    decision = pacer.leave(0, 2.0)
    assert (decision.version, decision.flush) == (1, None)


def test_when_the_slowest_leaves_the_others_iteration_is_completed() -> None:
    books, pacer = running(2)
    books.answered.add(0)
    pacer.push(0, 1.0)
    decision = pacer.leave(1, 2.0)
    assert (decision.version, decision.flush) == (1, Flush.MEAN)
