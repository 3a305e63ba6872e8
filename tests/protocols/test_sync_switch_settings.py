"""Sync-Switch: learning rate, momentum, and what is typed."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import pytest

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.protocols import PACED, Pacer, Verdict
from paceline.protocols.paced.phases import parse_phases
from paceline.protocols.paced.sync_switch import Momentum, SyncSwitch, momentum_factor
from paceline.protocols.settings import make
from paceline.store.ledger import Ledger
from paceline.store.work.budget import Source
from support.drive import Schedule, drive

every_momentum = pytest.mark.parametrize(
    "momentum", ["keep", "zero", "scaled", "two_stage", "double", "linear"]
)


# -- learning rate and momentum ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_synchronous_step_moves_as_far_as_the_n_pushes_it_is_made_of(n: int) -> None:
    run = RunConfig(run="", folder="", workers=n)
    gradients, lr = [float(i * i) for i in range(n)], n * 0.1
    together = lr * run.step_share(n, n, "mean") * sum(gradients) / n
    each = sum(lr * run.step_share(1, n) * gradient for gradient in gradients)
    assert together == pytest.approx(each)
    assert lr * run.step_share(1, n) == pytest.approx(0.1)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 1.0])
def test_a_schedule_stands_where_the_samples_say_whatever_the_share(share: float) -> None:
    run = RunConfig(run="", folder="", workers=3)
    ledger = Ledger(run, "sync_switch", SyncSwitch(f"bsp@{share},asp", total=96), lambda event: None)
    ledger.offer(Source(units=24, batch=2), range(3))
    for worker in range(3):
        ledger.join(worker, 0.0)
    random, computing = Random(0), {0, 1, 2}
    for _ in range(48):
        worker = random.choice(sorted(computing))
        assert ledger.budget is not None
        computing.discard(worker)
        computing.update(ledger.push(worker, 0.0, 2, [ledger.budget.draw(worker)]).release)
        assert ledger.position() == ledger.samples // (2 * 3)


@pytest.mark.parametrize(
    ("policy", "factors"),
    [
        ("keep", [1, 1, 1, 1]),
        ("zero", [0, 0, 0, 0]),
        ("scaled", [1 / 8, 1 / 8, 1 / 8, 1 / 8]),
        ("two_stage", [1 / 8, 1, 1, 1]),
        ("double", [1 / 8, 1 / 4, 1 / 2, 1]),
        ("linear", [1 / 8, 2 / 8, 3 / 8, 4 / 8]),
    ],
)
def test_momentum_policies_are_those_tried_in_the_paper(policy: Momentum, factors: list[float]) -> None:
    assert [momentum_factor(policy, stage, 8) for stage in range(4)] == factors
    if policy not in ("zero", "scaled"):
        assert momentum_factor(policy, 100_000, 8) == 1.0


@every_momentum
def test_momentum_is_adjusted_at_the_switch_and_at_each_stage_only(momentum: Momentum) -> None:
    protocol = SyncSwitch("bsp@0.25,asp", total=640, momentum=momentum)
    adjusted = [
        (step.clocks.total_samples, step.decision.adjust["momentum"])
        for step in drive(protocol, Schedule(workers=4, iterations=160, transient=0.0))
        if step.decision.adjust
    ]
    expected: dict[str, list[tuple[int, float]]] = {
        "keep": [],
        "zero": [(160, 0.0)],
        "scaled": [(160, 0.25)],
        "two_stage": [(160, 0.25), (200, 1.0)],
        "double": [(160, 0.25), (224, 0.5), (288, 1.0)],
        "linear": [(160, 0.25), (180, 0.5), (200, 0.75), (220, 1.0)],
    }
    assert adjusted == expected[momentum]


def test_momentum_is_whole_again_when_lockstep_comes_back() -> None:
    protocol = SyncSwitch("bsp@0.25,asp@0.5,bsp", total=160, momentum="scaled")
    steps = drive(protocol, Schedule(workers=4, iterations=40))
    assert [s.decision.adjust for s in steps if s.decision.adjust] == [{"momentum": 0.25}, {"momentum": 1.0}]


# -- what is typed --------------------------------------------------------------------------------------


def test_a_plan_is_read_as_it_is_written() -> None:
    first, second, third = parse_phases(" bsp@0.25, dssp( lower=1, upper = 4 ) @6e2 ,asp")
    assert (first.name, first.settings, first.end, first.text) == ("bsp", {}, 0.25, "bsp")
    assert (second.name, second.settings, second.end) == ("dssp", {"lower": "1", "upper": "4"}, 600.0)
    assert second.text == "dssp( lower=1, upper = 4 )"
    assert (third.name, third.end) == ("asp", None)
    assert parse_phases("bsp@0.25+dssp(lower=1+upper=4)@600+asp")[1].settings == second.settings


def test_what_comes_after_the_end_of_the_run_is_left_out() -> None:
    assert [phase.name for phase in parse_phases("bsp@0.5,asp@1,ssp")] == ["bsp", "asp"]


@pytest.mark.parametrize(
    ("phases", "named"),
    [
        ("", "''"),
        ("bsp@0.5,", "''"),
        ("bsp@0.5;asp", "'0.5;asp'"),
        ("bsp@0.5,ssp(staleness=3", "(staleness=3"),
        ("bsp@0.5,ssp(3)@0.6,asp", "'3'"),
        ("bsp@half,asp", "'half'"),
        ("bsp@-1,asp", "'-1'"),
        ("bsp@nan,asp", "'nan'"),
        ("bsp,asp", "'bsp'"),
        ("bsp@0.5,asp@0.7", "@0.7"),
        ("bsp@0.5,ssp@0.25,asp", "go back"),
        ("bsp@1,ssp@0.25,asp", "go back"),
        ("bsp@900,ssp@600,asp", "go back"),
        ("bsp@0.5,spp", "Did you mean 'ssp'"),
        ("bsp@0.5,ssp(stalenes=3)", "'staleness'"),
        ("bsp@0.5,ssp(staleness=-3)", "-3"),
        ("bsp@0.5,sync_switch", "sync_switch"),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused_with_what_is_wrong(phases: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        make("sync_switch", {"phases": phases})
    assert named in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [{"total": -1}, {"window": 0}, {"consecutive": 0}, {"slower": 0}, {"slower": 1}, {"smallest_group": 0}],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        make("sync_switch", settings)


def test_every_registered_protocol_can_be_a_phase() -> None:
    for name in sorted(PACED.keys() - {"sync_switch"}):
        assert type(make("sync_switch", {"phases": f"{name}@0.5,{name}"}).rule) is PACED[name]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("slow", "named"), [(8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7, ...")]
)
def test_a_note_names_eight_of_those_set_aside(slow: int, named: str) -> None:
    protocol = SyncSwitch("bsp@0.5,asp", total=100, online="elastic", smallest_group=0.1)
    pacer = Pacer(protocol)
    for worker in range(20):
        pacer.join(worker, 0.0)
    verdict = protocol._elastic(pacer.clocks, Verdict(), list(range(slow)))
    assert verdict.note.endswith(f"rank {named}")


def test_a_phase_that_lasts_to_the_end_has_none_while_the_total_is_unknown() -> None:
    (whole,), (half, _), (many, _) = (parse_phases(text) for text in ("bsp@1", "bsp@0.5,asp", "bsp@2,asp"))
    assert [phase.end_samples(None) for phase in (whole, half, many)] == [inf, inf, 2]
    assert [phase.end_samples(100) for phase in (whole, half, many)] == [100, 50, 2]
