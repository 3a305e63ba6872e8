"""What the books of a run tell the rule that parks slow workers."""

from __future__ import annotations

from pathlib import Path

from paceline.config import RunConfig
from paceline.protocols.settings import make
from paceline.store.ledger import Ledger
from paceline.trace.events import Event, Note


def books(folder: Path, told: list[Event]) -> Ledger:
    """Of three workers, the last of which is parked: there is room for two."""
    config = RunConfig(run="r", folder=str(folder), workers=3, weighting="sum", park_slow=0.611)
    ledger = Ledger(config, "asp", make("asp", {}), told.append)
    assert ledger.parking is not None
    ledger.parking.rate = 1.0
    for worker in range(3):
        ledger.join(worker, 0.0)
    now = 0.0
    while not ledger.pacer.clocks.benched:
        for worker in set(range(3)).difference(ledger.pacer.clocks.benched):
            now += 1.0 + worker
            decision = ledger.push(worker, now, 1)
            ledger.pushed(decision, now, 1, 0.1, 0.0, 1.0)
    return ledger


def test_an_evaluation_calls_nobody_back_and_a_death_does(tmp_path: Path) -> None:
    told: list[Event] = []
    ledger = books(tmp_path, told)
    aside = tuple(ledger.pacer.clocks.benched)
    away = ledger.leave(0, 1000.0, "away")
    assert away is not None
    assert away.release == ()
    ledger.join(0, 1001.0)
    died = ledger.leave(next(w for w in (1, 2) if w not in aside), 1002.0, "died")
    assert died is not None
    assert died.release == aside
    assert any(isinstance(e, Note) and "called back" in e.text for e in told)


def test_who_dies_while_it_evaluates_leaves_its_place_to_a_parked_one(tmp_path: Path) -> None:
    ledger = books(tmp_path, [])
    aside = tuple(ledger.pacer.clocks.benched)
    ledger.leave(0, 1000.0, "away")
    died = ledger.leave(0, 1001.0, "died")
    assert died is not None
    assert died.release == aside
