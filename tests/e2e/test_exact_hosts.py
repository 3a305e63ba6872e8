"""On hosts that share links, simulations of times and exact ones come to the same times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.protocols.settings import make_any
from paceline.sim import simulate, simulate_peers
from paceline.sim.request import ClusterRequest
from paceline.trace.events import AnyEvent, Decided
from support.runs import Lab

WORKERS, BATCH, SAMPLES, SEED = 4, 4, 96, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", 1)
PUSHES = SAMPLES // BATCH
CLUSTER = f"""
model_bytes = 6400
batch = {BATCH}
[compute]
kind = "fixed"
mean_s = 0.1
[slow]
3 = 2.5
[[host]]
bandwidth_bytes_per_s = 1e5
[[host]]
workers = 2
bandwidth_bytes_per_s = 2e5
latency_s = 0.001
[[host]]
bandwidth_bytes_per_s = 5e4
"""


def outline(events: list[AnyEvent]) -> list[tuple[float, int, float]]:
    """Who pushed when, until work runs out."""
    pushes = [e for e in events if isinstance(e, Decided) and e.pushed is not None]
    return [(round(e.t, 9), e.pushed or 0, round(e.exchange_s, 9)) for e in pushes[: PUSHES - 2 * WORKERS]]


@pytest.mark.parametrize(
    "name",
    [
        "asp",
        "allreduce",
        *(pytest.param(x, marks=pytest.mark.long) for x in ("bsp", "ssp", "hpsgd", "dpsgd")),
    ],
)
def test_times_on_hosts_are_those_of_an_exact_simulation(lab: Lab, name: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(CLUSTER)
    request, events = ClusterRequest(file=str(path)), list[AnyEvent]()
    told: Any = {"seed": SEED, "trace": events.append}
    protocol: Any = make_any(name, {})
    if name in ("asp", "bsp", "ssp"):
        simulate(protocol, request.cluster(), iterations=PUSHES // WORKERS, **told)
    else:
        simulate_peers(protocol, request.cluster(), iterations=PUSHES, **told)
    cluster: Any = msgspec.to_builtins(request, str_keys=True)
    named = {"workers": WORKERS, "protocol": name, "settings": {}, "seed": SEED, "cluster": cluster}
    run = lab.trained("train.py", "momentum", *SIZES, **named)
    assert outline(run.trace) == outline(events)
