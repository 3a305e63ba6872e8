"""When a waiting PSP worker checks again, and whom: one class for each reading of the paper. `PSP` calls
them.

Each class keeps the state of one reading and applies the rule of the protocol that holds it. None of them
scans all workers, or all waiting workers, at a push.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf, log1p
from typing import TYPE_CHECKING

import msgspec

from paceline.protocols.core.base import Verdict
from paceline.protocols.core.clocks import Clocks
from paceline.protocols.paced.psp_sampling import Hazards, draw_sample, hazards

if TYPE_CHECKING:
    from paceline.protocols.paced.psp import PSP

_SLACK_S = 1e-6
"""A timer may ring that much early, by rounding."""


class Redraw(msgspec.Struct, tag="event"):
    """A new sample for every waiting worker at every event.

    The samples themselves are never drawn. All workers that wait at one clock pass a check with the same
    chance q, independently. This is a race: each has the hazard -log(1 - q), and the next one passes when the
    hazards met have used up an exponentially distributed budget. The rest of a budget is distributed like a
    new one, so workers may come and go meanwhile. An event costs one subtraction for each clock at which
    workers wait, and the outcome is exact.
    """

    rooms: dict[int, list[int]] = {}
    """Workers that wait at each clock, in no order."""
    budget: float = 0.0
    """The hazard left to meet before the next one passes."""

    def decide(self, psp: PSP, clocks: Clocks, pushed: int | None) -> Verdict:
        if pushed is None:
            self._recount(clocks)
        else:
            room = self.rooms.get(clock := clocks.clock(pushed))
            if room is None:
                room = self.rooms[clock] = []
            room.append(pushed)
        if not psp.drawn:
            self.budget = -log1p(-psp.uniform())
        hazard = hazards(len(clocks.active) - 1, psp.sample, psp.pass_fraction)
        psp.queries += clocks.waiting_count * hazard.size
        return Verdict(release=self._look(psp, clocks, hazard))

    def _look(self, psp: PSP, clocks: Clocks, hazard: Hazards) -> tuple[int, ...]:
        passed: list[int] = []
        rooms, budget, sure = self.rooms, self.budget, -1
        for clock, waiting in tuple(rooms.items()):
            each = hazard[clocks.count_below(clock - psp.staleness)]
            met = each * len(waiting)
            if met <= budget:
                budget -= met
            elif each == inf:
                sure = max(sure, clock)
                del rooms[clock]
            else:
                budget = _race(psp, waiting, each, budget, passed)
                if not waiting:
                    del rooms[clock]
        self.budget = budget
        # Whom nobody holds back goes in the order of the table, as under SSP.
        return tuple(passed) if sure < 0 else (*clocks.waiting(up_to=sure), *passed)

    def _recount(self, clocks: Clocks) -> None:
        """Read the waiting workers from the table again if one of them is gone."""
        if sum(map(len, self.rooms.values())) == clocks.waiting_count:
            return
        self.rooms = {}
        for worker in clocks.waiting():
            self.rooms.setdefault(clocks.clock(worker), []).append(worker)


def _race(psp: PSP, waiting: list[int], hazard: float, budget: float, passed: list[int]) -> float:
    """Give every worker of a room this hazard, and move those that pass to the other list.

    Returns the rest of the budget.
    """
    count = len(waiting)
    while count and budget < hazard * count:
        hazard -= budget / count
        draw = psp.uniform() * count
        at = int(draw)
        budget = -log1p(at - draw)  # the fraction is as random as the whole
        passed.append(waiting[at])
        waiting[at] = waiting[-1]
        waiting.pop()
        count -= 1
    return budget - hazard * count


class KeptSample(msgspec.Struct, tag="fixed"):
    """One sample per barrier, drawn from the workers present then. A worker that leaves is removed from it.

    Clocks only rise, so a member that has caught up is not checked again, and a push concerns only the
    workers that wait for it.
    """

    members: list[int] = []
    """All active workers; emptied when a worker joins or leaves, and filled at the next draw."""
    behind: dict[int, list[int]] = {}
    """Per waiting worker: the members of its sample that it still waits for."""
    awaited_by: dict[int, list[int]] = {}
    """The same in the other direction. An entry may remain after its wait ended in another way."""

    def decide(self, psp: PSP, clocks: Clocks, pushed: int | None) -> Verdict:
        if pushed is None:
            passed = self._without_absent(psp, clocks)
        else:
            passed = self._level_with(psp, clocks, pushed)
            if self._passes_at_once(psp, clocks, pushed):
                passed.append(pushed)
        return Verdict(release=tuple(sorted(passed, key=clocks.clock)))

    def _passes_at_once(self, psp: PSP, clocks: Clocks, worker: int) -> bool:
        if not self.members:
            self.members = list(clocks.active)
        size, completed = psp.size(clocks), clocks.completed
        sample = draw_sample(self.members, worker, size, psp.uniform)
        psp.queries += size
        least = completed[worker] - psp.staleness
        lagging = [peer for peer in sample if completed[peer] < least]
        if len(lagging) <= psp.allowed(size):
            return True
        self.behind[worker] = lagging
        for peer in lagging:
            self.awaited_by.setdefault(peer, []).append(worker)
        return False

    def _level_with(self, psp: PSP, clocks: Clocks, peer: int) -> list[int]:
        """Workers that pass because this peer has caught up or is gone."""
        passed, allowed, completed = [], psp.allowed(psp.size(clocks)), clocks.completed
        level = completed.get(peer, inf) + psp.staleness
        for worker in dict.fromkeys(self.awaited_by.pop(peer, ())):
            lagging = self.behind.get(worker, [])
            if peer not in lagging:
                continue
            if completed[worker] > level:
                self.awaited_by.setdefault(peer, []).append(worker)
                continue
            lagging.remove(peer)
            if len(lagging) <= allowed:
                del self.behind[worker]
                passed.append(worker)
        return passed

    def _without_absent(self, psp: PSP, clocks: Clocks) -> list[int]:
        self.members = []
        if len(self.behind) != clocks.waiting_count:
            self.behind = {w: peers for w, peers in self.behind.items() if clocks.is_waiting(w)}
        gone = [peer for peer in self.awaited_by if peer not in clocks.active]
        return [worker for peer in gone for worker in self._level_with(psp, clocks, peer)]


class Apart(msgspec.Struct, tag="distributed"):
    """Decides nothing: every worker keeps its own barrier and reports when it has passed."""

    def decide(self, psp: PSP, clocks: Clocks, pushed: int | None) -> Verdict:
        return Verdict()


class Poll(msgspec.Struct, tag="poll"):
    """A new sample for a waiting worker every `poll_s` seconds, counted from its own push."""

    due: list[tuple[float, int, int]] = []
    """A heap of (time of a waiting worker's next check, its number, the worker)."""

    def decide(self, psp: PSP, clocks: Clocks, pushed: int | None) -> Verdict:
        if pushed is not None:
            heappush(self.due, (clocks.now, psp.drawn, pushed))
        elif len(self.due) != clocks.waiting_count:
            self.due = [entry for entry in self.due if clocks.is_waiting(entry[2])]
            heapify(self.due)
        passed = self._look(psp, clocks)
        next_s = self.due[0][0] - clocks.now if self.due else None
        return Verdict(release=passed, ask_again_s=next_s)

    def _look(self, psp: PSP, clocks: Clocks) -> tuple[int, ...]:
        passed, again = [], []
        while self.due and self.due[0][0] <= clocks.now + _SLACK_S:
            _, number, worker = heappop(self.due)
            psp.queries += psp.size(clocks)
            if psp.uniform() < psp.chance(clocks, clocks.clock(worker)):
                passed.append(worker)
            else:
                again.append((clocks.now + psp.poll_s, number, worker))
        for entry in again:
            heappush(self.due, entry)
        return tuple(passed)
