"""Peers in exact simulation: the numbers of real processes, and the decisions of sizes alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.protocols import PEERS
from paceline.protocols.settings import make_peer
from paceline.sim import simulate_peers
from paceline.sim.request import ClusterRequest
from paceline.trace.events import AnyEvent, Decided, Exchanged
from support.runs import Lab, Run, once

WORKERS, SAMPLES, BATCH, EPOCHS, SEED = 4, 192, 4, 1, 5
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
PUSHES = EPOCHS * SAMPLES // BATCH
TIGHT: dict[str, dict[str, Any]] = {
    "diloco": {"period": 3},
    "easgd": {"period": 2},
    "fedavg": {"period": 3},
    "hpsgd": {"round_length": 2},
    "local_sgd": {"period": 3},
    "osp": {"overlap": 0.6, "ramp": "constant", "rank_every": 2, "small_bytes": 0},
    "selsync": {"window": 2, "delta": 0.02},
}
LOOSE: list[tuple[str, dict[str, Any]]] = [
    ("dpsgd", {"overlap": True}),
    ("dpsgd", {"topology": "matching"}),
    ("dpsgd", {"measure_every": 3}),
    ("easgd", {"period": 2, "mode": "asynchronous"}),
    ("fedavg", {"period": 3, "fraction": 0.5}),
    ("hpsgd", {}),
    ("osp", {"budget": "measured", "rank_every": 2, "small_bytes": 0}),
]
"""Further ways in which workers talk: those that follow times, and those that compute twice."""
VARIANTS = [*((name, TIGHT.get(name, {})) for name in sorted(PEERS)), *LOOSE]
REPEATING = [each for each in VARIANTS if make_peer(*each).repeats]
FREE = [each for each in VARIANTS if not make_peer(*each).repeats]
SIZED = [each for each in VARIANTS if each[0] != "selsync"]
"""What sizes alone can simulate."""


def label(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *(f"{k}={v}" for k, v in variant[1].items())])


def request(**more: Any) -> ClusterRequest:
    return ClusterRequest(
        **{"workers": WORKERS, "slow": {3: 2.5}, "compute_s": 0.1, "jitter": 0.3, "batch": BATCH} | more
    )


def exactly(lab: Lab, variant: tuple[str, Any], *args: object, on: ClusterRequest, **dials: Any) -> Run:
    cluster = msgspec.to_builtins(on, str_keys=True)
    name, settings = variant
    named = {"workers": on.workers, "protocol": name, "settings": settings, "seed": SEED}
    return lab.trained("train.py", *args, **named | {"cluster": cluster} | dials)


def outline(events: list[AnyEvent]) -> list[tuple[Any, ...]]:
    """Who met whom when and for how long, who pushed and who was released, until work runs out."""
    seen: list[tuple[Any, ...]] = []
    for e in events:
        if isinstance(e, Exchanged):
            seen.append((round(e.t, 9), e.operation, e.workers, round(e.seconds, 9)))
        elif isinstance(e, Decided):
            spent = round(e.compute_s, 9), round(e.exchange_s, 9)
            seen.append((round(e.t, 9), e.pushed, e.clock, e.version, e.flushed, e.release, e.gap, spent))
    pushes = [i for i, e in enumerate(seen) if isinstance(e[1], int)]
    return seen[: pushes[PUSHES - 3 * WORKERS]]


@pytest.mark.parametrize("link", [{}, {"latency_s": 0.03}], ids=["no time", "some time"])
@pytest.mark.parametrize("variant", SIZED, ids=label)
def test_sizes_alone_make_the_decisions_of_an_exact_simulation(
    lab: Lab, variant: tuple[str, dict[str, Any]], link: dict[str, float]
) -> None:
    on, events = request(**link), list[AnyEvent]()
    run = exactly(lab, variant, "momentum", *SIZES, on=on)
    simulate_peers(make_peer(*variant), on.cluster(), iterations=PUSHES, seed=SEED, trace=events.append)
    assert outline(run.trace) == outline(events)
    assert run.used() == once(EPOCHS, SAMPLES)
