"""Who gets which batch, and who may go on at the end of an epoch."""

from __future__ import annotations

from collections.abc import Callable

from paceline.runtime.messages.workers import Draw, Linger
from paceline.runtime.run.member import Member
from paceline.store.ledger import Ledger
from paceline.store.work.budget import Batch


class BatchDispenser:
    """Hands the run's work out to its members."""

    def __init__(
        self,
        ledger: Ledger,
        living: Callable[[], list[Member]],
        grant: Callable[[Member, Batch | None], None],
        planned_epochs: int | None,
    ) -> None:
        """`grant` answers a member that asked; the script may have told how many epochs it means to run."""
        self._ledger = ledger
        self._those_alive = living
        self._living: list[Member] = []
        """Those who are there as it looks now."""
        self._grant = grant
        self.planned_epochs = planned_epochs

    def draw(self, member: Member) -> Batch | None:
        """The member's next batch; None when the store does not know the work, or there is none left."""
        budget = self._ledger.budget
        return None if budget is None or self._ledger.enough else budget.draw(member.rank)

    def ask(self, member: Member, message: Draw | Linger) -> None:
        """A member needs a batch, or has come to the end of an epoch."""
        if isinstance(message, Draw):
            member.draws = True
        else:
            member.lingers = member.seen_epoch = message.epoch
        self.answer()

    def answer(self) -> None:
        """Look again who of those that ask can be answered; called after everything that happens."""
        self._living = self._those_alive()
        if not any(x.draws or x.lingers is not None for x in self._living):
            return
        if self._ledger.enough:
            self._send_home()
        elif self._ledger.budget is not None:
            self._end_lingering()
            self._grant_draws()

    def _send_home(self) -> None:
        """Nobody gets further work, and nobody need wait for what others might leave."""
        for member in (x for x in self._living if x.draws or x.lingers is not None):
            member.draws, member.lingers = False, None
            self._grant(member, None)

    def _grant_draws(self) -> None:
        """Answer those who ask for a batch; in lockstep all at once, in rank order, so that a run repeats."""
        members = self._living
        lockstep = self._ledger.pacer.protocol.lockstep
        if lockstep and not all(x.draws or x.lingers is not None or self._waits(x) for x in members):
            return
        for member in (x for x in members if x.draws):
            member.draws = False
            self._grant(member, self.draw(member))

    def _end_lingering(self) -> None:
        """Let those go on who need not wait for work that a dying worker might leave behind."""
        budget = self._ledger.budget
        assert budget is not None
        for member in self._living:
            if member.lingers is None:
                continue
            if budget.has_returned(member.lingers):
                member.lingers = None
                self._grant(member, budget.draw(member.rank))
            elif not self._last_hope(member, member.lingers):
                member.looping, member.lingers = budget.holds(member.rank, member.lingers), None
                self._grant(member, None)

    def _last_hope(self, member: Member, epoch: int) -> bool:
        """Whether work of this epoch is under way that nobody but this worker could take over.

        Somebody who will draw again can. Unless this is the planned end: nobody draws after that,
        and nobody has anything else to do, so there everybody waits for everybody's last push.
        """
        budget = self._ledger.budget
        others = [x for x in self._living if x is not member and x.looping and x.lingers is None]
        if budget is None or (len(others) != 1 and self.planned_epochs != epoch + 1):
            return False
        return any(budget.holds(x.rank, epoch) and not self._waits(x) for x in others)

    def _waits(self, member: Member) -> bool:
        """Whether a worker sleeps until others come, be it with a gradient or (a peer) for nothing else."""
        meets = member.asks and not member.draws and member.lingers is None
        return meets or self._ledger.pacer.clocks.is_waiting(member.rank)
