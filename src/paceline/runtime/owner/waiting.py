"""Who waits for whom, as the owner of the store sees it: whoever has asked and was not answered, waits."""

from __future__ import annotations

from paceline.runtime.messages import workers as m
from paceline.runtime.owner.owner import Owner
from paceline.runtime.run.member import Member
from paceline.runtime.run.run import Run
from paceline.trace.waits import RunNow, WorkerNow

_CALLS: dict[type[m.FromWorker], str] = {
    m.Hello: "paceline.join",
    m.Register: "pace.prepare",
    m.Push: "optimizer.step",
    m.BarrierPassed: "optimizer.step",
    m.Meet: "optimizer.step",
    m.Draw: "next batch of the loader",
    m.Linger: "end of the loader's epoch",
    m.Away: "pace.evaluate",
    m.Back: "pace.evaluate",
}


def waits(owner: Owner) -> dict[int, tuple[int, ...]]:
    """Per worker that waits, for whom."""
    living = owner.living
    return {each.rank: tuple(sorted(_awaited(owner, each, living))) for each in living if each.asks}


def run_now(owner: Owner, now_s: float) -> RunNow:
    """Everybody at this moment; `now_s` on the monotonic clock."""
    graph, run = waits(owner), owner._run
    clocks = None if run is None else run.ledger.pacer.clocks.completed
    workers = tuple(
        WorkerNow(
            each.rank,
            each.pid,
            not each.far,
            state_of(each),
            call_of(each),
            now_s - each.since_s,
            0 if clocks is None else clocks.get(each.rank, 0),
            graph.get(each.rank, ()),
        )
        for each in owner.living
    )
    return RunNow(owner.now(), run is not None, workers)


def state_of(member: Member) -> str:
    """What a worker does, in a word."""
    if member.asks:
        return "waiting"
    if member.registered is None:
        return "preparing"
    return "evaluating" if isinstance(member.said, m.Away) else "computing"


def call_of(member: Member) -> str:
    """The call of ours that its last word came from."""
    said = member.said
    call = _CALLS.get(type(said), "") if said is not None else ""
    if isinstance(said, m.Meet) and said.call is not None:
        return f"{call}: {said.call}"
    return call


def _awaited(owner: Owner, member: Member, living: list[Member]) -> list[int]:
    run, awake = owner._run, [each for each in living if not each.asks and each is not member]
    if run is None:
        return [each.rank for each in living if each.registered is None]
    if owner.family.meets and not (member.draws or member.lingers is not None):
        missing = owner.family.missing(member.rank)
        return [each.rank for each in awake] if missing is None else missing
    if member.lingers is not None:
        return _holding(run, awake, member.lingers) or [each.rank for each in awake]
    return _slowest(run, awake)


def _holding(run: Run, awake: list[Member], epoch: int) -> list[int]:
    """Whoever has work of this epoch that it might leave."""
    budget = run.ledger.budget
    return [] if budget is None else [each.rank for each in awake if budget.holds(each.rank, epoch)]


def _slowest(run: Run, awake: list[Member]) -> list[int]:
    """Under a protocol that bounds the lead, whoever is furthest behind; in lockstep all who compute."""
    pacer = run.ledger.pacer
    there = [each.rank for each in awake if each.rank in pacer.clocks.active]
    if pacer.in_lockstep or not there:
        return there
    behind = min(pacer.clocks.clock(rank) for rank in there)
    return [rank for rank in there if pacer.clocks.clock(rank) == behind]
