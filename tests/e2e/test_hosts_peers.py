"""Peers on two hosts: the same numbers as on one, whatever happens to the wire between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.engines.local import LocalEngine
from paceline.protocols import PEERS
from paceline.protocols.settings import make_peer
from support.hosts import Apart
from support.runs import Lab, Run, once
from support.tensors import assert_equal

SAMPLES, BATCH, EPOCHS = 50, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
TIGHT: dict[str, dict[str, Any]] = {
    "diloco": {"period": 3},
    "easgd": {"period": 2},
    "fedavg": {"period": 3},
    "hpsgd": {"round_length": 2},
    "local_sgd": {"period": 3},
    "osp": {"overlap": 0.6, "ramp": "constant", "rank_every": 2, "small_bytes": 0},
    "selsync": {"window": 2, "delta": 0.02},
}
every_peer = pytest.mark.parametrize("protocol", sorted(PEERS))
every_repeating = pytest.mark.parametrize(
    "protocol", [name for name in sorted(PEERS) if make_peer(name, TIGHT.get(name, {})).repeats]
)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def elsewhere(warm_lab: Lab) -> Iterator[LocalEngine]:
    """The second host's engine."""
    engine = LocalEngine()
    warm_lab.further.add(engine._process.pid)
    yield engine
    warm_lab.further.discard(engine._process.pid)
    engine.close()


def trained(apart: Apart) -> Run:
    """Wait for a run that has to finish."""
    run = apart.finish()
    assert run.result.status == "finished", f"{run.end.detail}\n{run.logs()}"
    return run


@every_repeating
@pytest.mark.parametrize("here", [0, 2])
def test_two_hosts_arrive_where_one_does_bit_for_bit(
    lab: Lab, elsewhere: LocalEngine, protocol: str, here: int
) -> None:
    """Dropout, BatchNorm and a shuffled loader included; no round has to be full."""
    args = ("train.py", "noisy", *SIZES, "--shuffle")
    dials: dict[str, Any] = {
        "workers": 4,
        "protocol": protocol,
        "settings": TIGHT.get(protocol, {}),
        "seed": 7,
    }
    near = lab.trained(*args, **dials, private_weights=True)
    apart = Apart(lab, elsewhere, *args, here=here, **dials)
    apart.host(4 - here)
    far = trained(apart)
    assert_equal(far.weights, near.weights)
    assert far.used() == once(EPOCHS, SAMPLES)
