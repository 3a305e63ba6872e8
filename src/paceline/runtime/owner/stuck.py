"""Watches over workers that say nothing: names them, and does with them what `--stuck-after` says.

A worker that computes is silent; how long that may take is learnt from itself. It is named after `QUIET_S`,
or after several times what it usually takes, whichever is more, and only if somebody waits for it or it
holds work that nobody else can do: what a script does after its last iteration is its own business. Silence
counts from when the owner was there to hear.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from statistics import median

from paceline.amounts import parse_stuck
from paceline.fabric.presence import counted_from
from paceline.runtime.owner.owner import Owner
from paceline.runtime.owner.waiting import run_now, state_of, waits
from paceline.runtime.run.member import Member
from paceline.trace.events import Heard, Silent
from paceline.trace.waits import NOTICES, REQUEST, write_now

QUIET_S = 8.0
"""Nobody is named earlier: with the time between two looks, and for the message to be seen, within 10 s."""
LOOK_S = 1.0
USUAL = 4.0
"""How many times its usual time a worker may take."""
LONGEST = 2.0
"""How many times the longest it ever took."""


class StuckWatch:
    """One per real run."""

    def __init__(self, owner: Owner, drop: Callable[[Member, str], None]) -> None:
        """`drop` ends a worker and has the others go on without it."""
        self._owner, self._drop = owner, drop
        self._text = owner.config.stuck_after or ""
        self._asked = parse_stuck(self._text) if self._text else None
        self._named: dict[Member, float] = {}
        """Who was named, and the beginning of its silence."""
        self._next_s = 0.0
        self._notices = owner.config.path / NOTICES

    def look(self, now_s: float) -> None:
        """See who is back, and, once a second, who is silent."""
        if self._named:
            self._welcome_back(now_s)
        if now_s < self._next_s or self._owner.ending:
            return
        self._next_s = now_s + LOOK_S
        self._answer(now_s)
        graph = waits(self._owner)
        for member in self._owner.living:
            waiting = tuple(rank for rank, awaited in graph.items() if member.rank in awaited)
            if not member.asks and (waiting or self._holds_work(member)):
                self._judge(member, self._silent_s(member, waiting, now_s), waiting)

    def _judge(self, member: Member, silent_s: float, waiting: tuple[int, ...]) -> None:
        limit_s, action = self._asked or (0.0, "warn")
        if action != "warn" and silent_s >= limit_s:
            self._act(member, silent_s, action)
        elif member not in self._named and silent_s >= self._patience_s(member, bool(waiting)):
            self._named[member] = member.since_s
            self._tell(member, silent_s, waiting)

    def _patience_s(self, member: Member, waited_for: bool) -> float:
        """How long it may be silent before it is named."""
        if self._asked is not None and self._asked[1] == "warn":
            return self._asked[0]
        if member.spells:
            return max(QUIET_S, USUAL * median(member.spells), LONGEST * member.longest_s)
        others = [each.first_s for each in self._owner.living if each.first_s is not None]
        if not (waited_for or others):
            return float("inf")  # a first iteration may take long, and nobody knows how long
        return max(QUIET_S, USUAL * max(others, default=0.0))

    def _silent_s(self, member: Member, waiting: tuple[int, ...], now_s: float) -> float:
        """Before training begins there is nothing to say: it counts from when somebody waits."""
        since = counted_from(member.since_s)
        if member.registered is None and waiting:
            since = max(since, min(self._owner.members[rank].since_s for rank in waiting))
        return now_s - since

    def _holds_work(self, member: Member) -> bool:
        """Whether it has a batch that it has not finished, in the loop of an epoch."""
        run = self._owner._run
        budget = None if run is None else run.ledger.budget
        return budget is not None and member.looping and budget.holds(member.rank, budget.epoch)

    def _tell(self, member: Member, silent_s: float, waiting: tuple[int, ...]) -> None:
        owner, run = self._owner, self._owner._run
        clock = 0 if run is None else run.ledger.pacer.clocks.completed.get(member.rank, 0)
        folder, state = owner.config.folder, state_of(member)
        event = Silent(
            owner.now(), member.rank, silent_s, waiting, clock, state, folder, owner.config.connects
        )
        if run is not None:
            owner.trace.write(event)
            return
        with contextlib.suppress(OSError), self._notices.open("a") as file:  # the trace has not begun
            file.write(event.text + "\n")

    def _welcome_back(self, now_s: float) -> None:
        for member, since in list(self._named.items()):
            if member.since_s != since and self._owner._run is not None:
                self._owner.trace.write(Heard(self._owner.now(), member.rank, now_s - since))
            if member.gone or member.since_s != since:
                del self._named[member]

    def _act(self, member: Member, silent_s: float, action: str) -> None:
        told = f"silent for {silent_s:.0f} s (--stuck-after {self._text})"
        if action == "stop":
            self._owner.stop("failed", f"rank {member.rank} was {told}")
        self._drop(member, told)

    def _answer(self, now_s: float) -> None:
        """Somebody wants to know who waits for whom."""
        folder = self._owner.config.path
        with contextlib.suppress(OSError):
            (folder / REQUEST).unlink()
            write_now(folder, run_now(self._owner, now_s))

    @property
    def due_s(self) -> float:
        """How long to sleep at most."""
        return max(0.0, self._next_s - time.monotonic())
