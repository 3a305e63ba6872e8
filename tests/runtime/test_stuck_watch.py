"""When a silent worker is named, and when a long iteration is only that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import RunConfig
from paceline.fabric import presence
from paceline.fabric.channel import Channel
from paceline.runtime.messages import workers as m
from paceline.runtime.owner.owner import Owner
from paceline.runtime.owner.stuck import QUIET_S, StuckWatch
from paceline.runtime.run.member import Member
from paceline.trace.waits import NOTICES
from paceline.view.stacks import parse_stacks


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    presence._anew()  # these tests set clocks back to before this process may have been starved
    (tmp_path / "logs").mkdir()
    owner = Owner(RunConfig(run="r", folder=str(tmp_path), workers=2), time.monotonic)
    ends = []
    for rank in range(2):
        mine, theirs = Channel.pair()
        ends.append(theirs)
        owner.add(rank, Channel(mine), 1)
    yield owner
    for member in owner.living:
        member.channel.close()
    for end in ends:
        end.close()
    owner.trace.close()


def test_a_worker_may_take_several_times_what_it_usually_takes(owner: Owner) -> None:
    watch, member = StuckWatch(owner, lambda who, why: None), owner.members[1]
    assert watch._patience_s(member, waited_for=False) == float("inf")
    assert watch._patience_s(member, waited_for=True) == QUIET_S
    owner.members[0].first_s = 30.0  # the other's first iteration took that long: so may this one's
    assert watch._patience_s(member, waited_for=True) == 120
    member.first_s, member.spells, member.longest_s = 90.0, type(member.spells)([0.1, 0.2, 0.1]), 0.2
    assert watch._patience_s(member, waited_for=True) == QUIET_S
    member.spells.extend([20.0] * 4)
    assert watch._patience_s(member, waited_for=True) == 80
    member.longest_s = 60.0  # its own validation at the end of an epoch, say
    assert watch._patience_s(member, waited_for=True) == 120


def test_sleep_is_not_silence(owner: Owner) -> None:
    member = owner.members[0]
    member.since_s -= 5
    member.speaks(m.Push(0.1, 4))
    assert member.first_s is not None
    assert member.first_s >= 5
    member.asks = True
    member.since_s -= 50
    member.speaks(m.Draw())
    assert (member.longest_s, list(member.spells)) == (0.0, [])


def test_who_is_late_before_training_is_named_once_and_only_after_somebody_waits(owner: Owner) -> None:
    watch, (early, late) = StuckWatch(owner, lambda who, why: None), owner.living
    notices = owner.config.path / NOTICES
    now = time.monotonic()
    late.since_s = early.since_s = now - 1000
    watch.look(now)
    assert not notices.exists()
    _registers(early, now)
    watch.look(now + QUIET_S - 1)
    assert not notices.exists()
    watch.look(now + QUIET_S + 1)
    watch.look(now + QUIET_S + 3)
    assert notices.read_text().count("rank 1 is silent for 9 s, preparing; rank 0 waits for it.") == 1


def _registers(member: Member, now: float) -> None:
    member.registered = object()  # type: ignore[assignment]
    member.asks, member.since_s = True, now


def test_stacks_are_read_as_faulthandler_writes_them() -> None:
    text = (
        'Thread 0x00007f01 (most recent call first):\n  File "/a/b.py", line 3 in wait\n\n'
        'Current thread 0x00007f00 (most recent call first):\n  File "/a/c d.py", line 12 in inner\n'
        '  File "/a/c d.py", line 40 in <module>\n'
    )
    main, other = parse_stacks(text)
    assert (main.main, other.main) == (True, False)
    assert [str(frame) for frame in main.frames] == ["/a/c d.py:12 in inner", "/a/c d.py:40 in <module>"]
    assert other.frames[0].function == "wait"
