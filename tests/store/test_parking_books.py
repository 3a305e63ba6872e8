"""What the books of a run tell the rule that parks slow workers."""

from __future__ import annotations

from math import pi
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("weighting", "share"),
    [("sum", lambda active: 1.0), ("mean", lambda active: 1 / active), (0.25, lambda active: 0.25)],
)
def test_the_load_counts_a_push_by_its_share_of_a_step(
    tmp_path: Path, weighting: object, share: object
) -> None:
    """lr x share x curvature x (M - 1/2): with the mean of all a push counts 1/M, so more may be active."""
    config = RunConfig(run="r", folder=str(tmp_path), workers=3, weighting=weighting, park_slow=2.0)  # type: ignore[arg-type]
    rule = Ledger(config, "asp", make("asp", {}), lambda event: None).parking
    assert rule is not None
    loads = {active: 2.0 * share(active) * (active - 0.5) for active in range(1, 21)}  # type: ignore[operator]
    for rate in (0.01, 0.05, 0.1, 0.2, 0.5, 0.7):
        rule.rate = rate
        for active, load in loads.items():
            assert rule.load(active) == pytest.approx(rate * load)
        within = [active for active, load in loads.items() if rate * load <= 0.7 * pi / 2]
        assert rule.most(20) == max(within, default=1)


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
