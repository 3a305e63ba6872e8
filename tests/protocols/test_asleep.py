"""Every second of a peer's sleep is on record once: with its push, as waiting, or as an exchange."""

from __future__ import annotations

from paceline.protocols.core.asleep import Asleep


def test_a_sleep_without_a_push_is_waiting_but_for_what_travels() -> None:
    asleep = Asleep()
    asleep.came(0, 10.0, pushes=False)
    asleep.travels(0, 0.5)
    asleep.travels(0, 1.0)
    asleep.woke(0, 14.0)
    assert asleep.take(0) == (2.5, 1.5)
    assert asleep.take(0) == (0.0, 0.0), "it was asked for already"


def test_what_is_waited_until_a_push_is_released_is_on_record_already() -> None:
    asleep = Asleep()
    asleep.came(0, 10.0, pushes=True)
    asleep.released(0, 13.0)
    asleep.released(0, 13.5)
    asleep.travels(0, 0.25)
    asleep.woke(0, 14.0)
    assert asleep.take(0) == (0.75, 0.25)


def test_one_that_is_lost_while_its_push_is_not_answered_waits_on_record() -> None:
    asleep = Asleep()
    asleep.came(0, 10.0, pushes=True)
    asleep.woke(0, 14.0)
    assert asleep.take(0) == (0.0, 0.0)


def test_a_release_books_nothing_for_one_that_came_without_a_push() -> None:
    asleep = Asleep()
    asleep.came(0, 10.0, pushes=False)
    asleep.released(0, 13.0)
    asleep.woke(0, 14.0)
    assert asleep.take(0) == (4.0, 0.0)


def test_an_exchange_takes_no_longer_than_the_sleep() -> None:
    asleep = Asleep()
    asleep.came(0, 10.0, pushes=False)
    asleep.travels(0, 9.0)
    asleep.woke(0, 12.0)
    assert asleep.take(0) == (0.0, 2.0)


def test_sleeps_add_up_for_each_worker_alone_and_who_is_awake_has_none() -> None:
    asleep = Asleep()
    for begins in (10.0, 20.0):
        asleep.came(0, begins, pushes=False)
        asleep.travels(0, 1.0)
        asleep.woke(0, begins + 3.0)
        asleep.travels(0, 5.0)
        asleep.released(0, begins + 4.0)
        asleep.woke(0, begins + 5.0)
    assert asleep.take(1) == (0.0, 0.0)
    assert asleep.take(0) == (4.0, 2.0)
