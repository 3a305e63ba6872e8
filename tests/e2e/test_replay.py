"""What a real run recorded, a protocol alone decides again: the same object drives both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.protocols import PACED, Decision, Pacer
from paceline.protocols.settings import make
from paceline.trace.events import Asked, Decided, ModelReady, Passed, Planned, WorkerJoined, WorkerLeft
from support.runs import Lab, Run
from support.variants import label, variants

WORKERS = 4
SIZES = ("--samples", 120, "--batch", 4, "--epochs", 2)
DIALS = {"workers": WORKERS, "device_time_s": 0.002, "jitter": 0.5, "slow": {3: 3.0}}


def decided_again(run: Run) -> Iterator[tuple[Decided, Decision]]:
    """Tell a fresh pacer what happened, in order; each recorded verdict with the new one.

    A verdict that changed nothing is not on record. One without a push follows the membership
    event that asked for it.
    """
    pacer = Pacer(make(run.result.protocol, run.result.settings))
    decision: Decision | None = None
    for event in run.trace:
        match event:
            case WorkerJoined():
                decision = pacer.join(event.worker, event.t)
            case ModelReady():
                samples = event.samples_per_epoch or 0
            case Planned():
                pacer.plan(event.epochs * samples)
            case Asked():
                decision = pacer.timer(event.t)
            case Passed():
                decision = pacer.passed(event.worker, event.t)
            case WorkerLeft() if pacer.clocks.is_present(event.worker):
                decision = pacer.leave(event.worker, event.t)
            case Decided():
                if event.pushed is not None:
                    usable = event.fate != "skip"
                    decision = pacer.push(event.pushed, event.t, event.samples, usable=usable)
                assert decision is not None
                yield event, decision


def recorded(event: Decided) -> dict[str, Any]:
    return {
        "number": event.number,
        "fate": event.fate,
        "flush": event.flush,
        "flushed": event.flushed,
        "release": event.release,
        "version": event.version,
        "read": event.read,
        "staleness": event.staleness,
        "gap": event.gap,
    }


def as_recorded(decision: Decision) -> dict[str, Any]:
    pushed = decision.pushed is not None
    return {
        "number": decision.number,
        "fate": decision.fate.value if decision.fate else None,
        "flush": decision.flush.value if decision.flush else None,
        "flushed": tuple(decision.flushed),
        "release": decision.release,
        "version": decision.version,
        "read": decision.read if pushed else 0,
        "staleness": decision.staleness,
        "gap": decision.gap,
    }


@pytest.mark.parametrize("variant", variants(), ids=label)
def test_a_recorded_run_is_decided_again_in_the_same_way(lab: Lab, variant: tuple[str, Any]) -> None:
    protocol, settings = variant
    run = lab.trained("train.py", "momentum", *SIZES, protocol=protocol, settings=settings, **DIALS)
    pairs = list(decided_again(run))
    assert len(pairs) >= len(run.pushes) == 60
    for event, decision in pairs:
        assert as_recorded(decision) == recorded(event)


@pytest.mark.parametrize("protocol", sorted(PACED))
def test_a_recorded_run_with_a_death_is_decided_again_in_the_same_way(lab: Lab, protocol: str) -> None:
    running = lab.start("train.py", "momentum", *SIZES, *lab.pause(3), protocol=protocol, **DIALS)
    lab.until_paused(WORKERS)
    running.kill(3)
    lab.go_on()
    run = lab.finish(running)
    assert run.died == {3}
    for event, decision in decided_again(run):
        assert as_recorded(decision) == recorded(event)
