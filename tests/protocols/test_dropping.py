"""`--drop-staler`: gradients dropped for their staleness, whatever the protocol says of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.protocols import Fate
from paceline.protocols.rules.dropping import told
from paceline.protocols.settings import make
from paceline.sim import Cluster, Lognormal, simulate
from paceline.trace.events import AnyEvent, Decided, Note
from support.drive import Schedule, drive
from support.variants import label, variants


@pytest.mark.parametrize("variant", variants(), ids=label)
@settings(max_examples=8, deadline=None)
@given(limit=st.integers(0, 5), seed=st.integers(0, 99), slow=st.integers(1, 9))
def test_nothing_staler_than_the_limit_takes_part_and_somebody_can_always_run(
    variant: tuple[str, dict[str, Any]], limit: int, seed: int, slow: int
) -> None:
    schedule = Schedule(workers=4, seed=seed, speeds=(1, 2, 2, slow))
    for step in drive(make(*variant), schedule, drop_staler=limit):
        decision = step.decision
        if step.event == "push" and decision.staleness > limit:
            assert decision.fate is Fate.DROP
            assert decision.version - (decision.read + decision.staleness) in (0, bool(decision.flush))


@settings(max_examples=20, deadline=None)
@given(limit=st.integers(0, 6), seed=st.integers(0, 99))
def test_under_asp_exactly_the_staler_ones_are_dropped_and_every_worker_goes_on(
    limit: int, seed: int
) -> None:
    applied = 0
    for step in drive(make("asp", {}), Schedule(seed=seed, speeds=(1, 1, 2, 6)), drop_staler=limit):
        if step.event == "push":
            decision = step.decision
            assert (decision.fate is Fate.DROP) == (decision.staleness > limit)
            assert step.released == (step.worker,)
            applied += decision.fate is Fate.APPLY
            assert decision.version == applied


def test_without_a_limit_nothing_changes() -> None:
    plain, unlimited = (
        [step.decision for step in drive(make("ssp", {}), Schedule(speeds=(1, 5)), drop_staler=limit)]
        for limit in (None, 10**9)
    )
    assert plain == unlimited


@pytest.mark.parametrize("summarise", [False, True])
def test_a_simulation_of_times_drops_them_counts_them_and_says_so(summarise: bool) -> None:
    cluster, events = Cluster(workers=4, compute=Lognormal(1.0, 0.1), slow={3: 3.0}), list[AnyEvent]()
    asked: dict[str, Any] = {"iterations": 25, "summarise": summarise}
    whole = simulate(make("asp", {}), cluster, **asked).result()
    some = simulate(make("asp", {}), cluster, drop_staler=4, trace=events.append, **asked).result()
    assert whole.staleness is not None
    assert some.staleness is not None
    assert (whole.dropped, whole.staleness.max > 4) == (0, True)
    assert some.staleness.max <= 4
    assert some.dropped == 100 - some.updates > 0
    assert (some.samples, some.iterations) == (whole.samples, 100)
    if not summarise:
        assert some.dropped == sum(isinstance(e, Decided) and e.fate == "drop" for e in events)
    assert any(isinstance(e, Note) and "more than 4 updates are dropped" in e.text for e in events)


def test_in_lockstep_people_are_told_that_it_changes_nothing() -> None:
    assert "changes nothing: under 'bsp'" in told(3, "bsp", True)
    assert told(None, "bsp", True) == ""
