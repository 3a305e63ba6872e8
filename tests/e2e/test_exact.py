"""Exact simulation: real gradients under a virtual clock, and the decisions of the timing-only simulator."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.protocols.settings import make
from paceline.sim import simulate
from paceline.sim.request import ClusterRequest
from paceline.trace.events import AnyEvent, Decided
from support.runs import Lab, once
from support.tensors import assert_equal
from support.variants import label, variants

WORKERS, SAMPLES, BATCH, EPOCHS, SEED = 4, 192, 4, 1, 5
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
REQUEST = ClusterRequest(workers=WORKERS, slow={3: 2.5}, compute_s=0.1, jitter=0.3, batch=BATCH)
PUSHES = EPOCHS * SAMPLES // BATCH


def exactly(lab: Lab, name: str, settings: dict[str, Any]) -> Any:
    cluster = msgspec.to_builtins(REQUEST, str_keys=True)
    dials = {"workers": WORKERS, "protocol": name, "settings": settings, "seed": SEED, "cluster": cluster}
    return lab.trained("train.py", "momentum", *SIZES, **dials)


def outline(events: list[AnyEvent]) -> list[tuple[Any, ...]]:
    """Who pushed when, what became of it and who was released, until work runs out."""
    pushes = [e for e in events if isinstance(e, Decided) and e.pushed is not None]
    return [
        (round(e.t, 9), e.pushed, e.fate, e.flush, e.flushed, sorted(e.release), e.version, e.staleness)
        for e in pushes[: PUSHES - 2 * WORKERS]
    ]


@pytest.mark.parametrize("variant", variants(), ids=label)
def test_timing_alone_makes_the_decisions_of_an_exact_simulation(
    lab: Lab, variant: tuple[str, dict[str, Any]]
) -> None:
    name, settings = variant
    settings = settings | ({"total": EPOCHS * SAMPLES} if name == "sync_switch" else {})
    events: list[AnyEvent] = []
    protocol = make(name, settings)
    simulate(protocol, REQUEST.cluster(), iterations=PUSHES // WORKERS, seed=SEED, trace=events.append)
    run = exactly(lab, name, settings)
    assert outline(run.trace) == outline(events)
    assert run.used() == once(EPOCHS, SAMPLES)


@pytest.mark.parametrize("name", ["hybrid_sgd", "sync_switch", "psp"])
def test_an_exact_simulation_repeats_bit_for_bit(lab: Lab, name: str) -> None:
    settings = {"wait": "never", "h": 7} if name == "hybrid_sgd" else {}
    assert_equal(exactly(lab, name, settings).weights, exactly(lab, name, settings).weights)
