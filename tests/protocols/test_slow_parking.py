"""Workers that are parked while a run goes on: over random schedules, with deaths and newcomers."""

from __future__ import annotations

from math import pi

import pytest

from paceline.errors import ConfigError
from paceline.protocols import Pacer
from paceline.protocols.rules import slow_parking
from paceline.protocols.rules.slow_parking import SAFETY, WINDOW, SlowParking
from paceline.protocols.settings import make
from paceline.sim import Cluster, Fixed, Lognormal, simulate
from paceline.trace.events import Decided, Note
from support.drive import Schedule, Step, drive

SPEEDS = (8, 8, 16, 16, 48, 48)
"""Their iterations take 8 to 12, 16 to 24, 48 to 72 ticks: who is slower is never in doubt."""


def exactly(workers: int) -> SlowParking:
    """A rule that lets just so many be active."""
    return SlowParking(1.0, lambda active: 1.0, SAFETY * pi / 2 / (workers - 0.2))


def driven(rule: SlowParking, protocol: str, **schedule: object) -> list[Step]:
    named: dict[str, object] = {"workers": 6, "speeds": SPEEDS, "transient": 0.0, "iterations": 150}
    return list(drive(make(protocol, {}), Schedule(**named | schedule), parking=rule))  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_the_bound_says_how_many(most: int) -> None:
    rule = exactly(most)
    assert rule.most(20) == most
    assert rule.load(most) <= SAFETY * pi / 2 < rule.load(most + 1)
    assert rule.most(1) == 1
    rule.rate /= 1000
    assert rule.most(20) == 20
    rule.rate = 1e9
    assert rule.most(20) == 1, "somebody has to work"


@pytest.mark.parametrize("protocol", ["asp", "ssp", "dssp"])
@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_slowest_are_parked_and_as_many_as_the_bound_says_go_on(
    protocol: str, most: int, seed: int
) -> None:
    steps = driven(exactly(most), protocol, seed=seed)
    parked = [rank for step in steps for rank in step.decision.bench]
    assert len(parked) >= 6 - most
    for step in steps:
        slow = {SPEEDS[w] for w in step.benched}
        running = {SPEEDS[w] for w in step.after if w != 0}
        if len(step.after) == most and step.benched and running:
            assert max(running) <= min(slow), "a faster one is parked"
    full = next(number for number, step in enumerate(steps) if len(step.benched) == 6 - most)
    left = next((number for number, step in enumerate(steps) if step.event == "finished"), len(steps))
    assert {len(step.after) for step in steps[full:left]} <= {most, most + 1}
    assert full < left


@pytest.mark.parametrize("protocol", ["asp", "ssp", "dssp"])
@pytest.mark.parametrize("seed", range(15))
def test_nothing_hangs_and_somebody_always_runs_whoever_dies_or_joins(protocol: str, seed: int) -> None:
    """`drive` fails when all wait; every worker that is there in the end has done its iterations."""
    deaths = tuple((400 + 311 * i, (seed + 3 * i) % 6) for i in range(6))
    joins = tuple((900 + 401 * i, (seed + i) % 6) for i in range(5))
    rule = exactly(1 + seed % 3)
    steps = driven(rule, protocol, seed=seed, deaths=deaths, joins=joins, iterations=120, transient=0.1)
    assert any(step.decision.bench for step in steps)
    for step in steps:
        assert step.computing or not (step.after or step.benched) or step.waiting
        assert 0 not in step.decision.bench
        assert not step.benched or step.after, "the last one that is active is not parked"
        assert set(step.benched).isdisjoint(step.after)
    assert not steps[-1].after
    assert not steps[-1].benched


def test_a_parked_worker_is_called_back_at_once_when_another_dies() -> None:
    steps = driven(exactly(3), "asp", deaths=((3000, 1),), iterations=400)
    died = next(step for step in steps if step.event == "died")
    assert len(died.benched) == 2
    assert len(died.released) == 1
    assert died.released[0] in (2, 3), "the fastest of the parked"
    assert f"called back, as there is room for 3: rank {died.released[0]}" in died.decision.note


def test_who_is_away_keeps_its_place_and_who_does_not_come_back_loses_it() -> None:
    """An evaluation calls nobody back, unless nobody else runs."""
    rule = exactly(2)
    pacer = Pacer(make("asp", {}), parking=rule)
    for worker in range(3):
        pacer.join(worker, 0.0)
    for number in range(WINDOW):
        pacer.push(number % 3, float(number + number % 3))
    decision = pacer.push(2, 1000.0)
    assert decision.bench == (2,)
    assert pacer.leave(0, 1001.0, away=True).release == ()
    assert pacer.push(1, 1002.0).release == (1,)
    gone = pacer.gone(0, 1003.0)
    assert gone is not None
    assert gone.release == (2,)


def test_all_are_called_back_when_all_others_are_away() -> None:
    pacer = Pacer(make("asp", {}), parking=exactly(1))
    for worker in range(2):
        pacer.join(worker, 0.0)
    parked = [pacer.push(number % 2, float(number)).bench for number in range(WINDOW)]
    assert parked[-1] == (1,)
    assert pacer.leave(0, 1001.0, away=True).release == (1,)
    pacer.join(0, 1002.0)
    assert pacer.push(1, 1003.0).bench == (1,), "it is still the slow one"


def test_a_smaller_rate_calls_back_and_five_per_cent_keep_from_wavering() -> None:
    rule = exactly(2)
    steps = drive(make("asp", {}), Schedule(4, speeds=(8, 8, 16, 48), iterations=2000), parking=rule)
    changes = []
    for number, step in enumerate(steps):
        if number == 1000:
            rule.rate = SAFETY * pi / 2 / 2.51  # three workers would be within the bound, but barely
        if number == 3000:
            rule.rate = SAFETY * pi / 2 / 2.7
        if step.decision.bench or (step.event == "push" and len(step.released) > 1):
            changes.append((number, step.decision.bench, step.released))
        if number == 4500:
            break
    assert [bench for _, bench, _ in changes if bench] in ([(2,), (3,)], [(3,), (2,)])
    [(when, _, released)] = [change for change in changes if not change[1]]
    assert when >= 3000
    assert 2 in released


def test_a_worker_that_became_slow_takes_the_place_of_one_that_is_parked() -> None:
    pacer = Pacer(make("asp", {}), parking=exactly(2))
    now, due = 0.0, {0: 1.0, 1: 1.0, 2: 2.0}
    for worker in due:
        pacer.join(worker, 0.0)
    parked = []
    for number in range(5 * WINDOW):
        now, worker = min((at, w) for w, at in due.items())
        decision = pacer.push(worker, now)
        parked += decision.bench
        del due[worker]
        took = {0: 1.0, 1: 1.0 if number < 2 * WINDOW else 4.0, 2: 2.0}
        due |= {w: now + took[w] for w in decision.release}
    assert parked == [2, 1]
    assert set(pacer.clocks.benched) == {1}


def test_a_simulation_says_whom_it_parks_and_finishes() -> None:
    events: list[object] = []
    cluster = Cluster(workers=8, compute=Lognormal(0.1, 0.2), slow={6: 3.0, 7: 5.0})
    tally = simulate(
        make("ssp", {}), cluster, iterations=200, parking=exactly(6), trace=events.append
    )  # fmt: skip
    assert tally.result().status == "finished"
    assert tally.result().samples == 8 * 200
    notes = [event.text for event in events if isinstance(event, Note)]
    assert [text.partition(",")[0] for text in notes if text.startswith("parked")][:2] in (
        ["parked: rank 7", "parked: rank 6"],
        ["parked: rank 6", "parked: rank 7"],
    )
    pushed = [e.pushed for e in events if isinstance(e, Decided)]
    assert pushed.count(7) < 40


def test_a_push_takes_no_longer_with_many_workers() -> None:
    """Counted, not timed: over whole windows, means are looked at about once per push."""
    looked = 0

    class Counted(SlowParking):
        def _cycle_s(self, clocks, worker):  # type: ignore[no-untyped-def]
            nonlocal looked
            looked += 1
            return super()._cycle_s(clocks, worker)

    rule = Counted(1.0, lambda active: 1.0, SAFETY * pi / 2 / (900 - 0.2))
    simulate(
        make("asp", {}), Cluster(workers=1000, compute=Fixed(0.1), slow={7: 2.0}), iterations=20, parking=rule
    )
    assert looked <= 3 * 20 * 1000


@pytest.mark.parametrize("name", ["bsp", "hybrid_sgd", "sync_switch", "elastic_bsp", "psp", "local_sgd"])
def test_protocols_that_hold_gradients_or_wait_for_all_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"protocol '{name}' does not allow"):
        slow_parking.check(10.0, name, paced=name != "local_sgd")


def test_a_protocol_forgets_whom_it_has_granted_iterations_once_that_one_is_parked() -> None:
    """Under DSSP a fast worker has iterations in hand; it is parked since it has become slow."""
    protocol = make("dssp", {"lower": 1, "upper": 12})
    schedule = Schedule(6, speeds=(8, 9, 10, 12, 48, 60), iterations=200, transient=0.2)
    parked = 0
    for step in drive(protocol, schedule, parking=exactly(2)):
        parked += len(step.decision.bench)
        assert not set(step.decision.bench).intersection(protocol.grants)  # type: ignore[attr-defined]
    assert parked
