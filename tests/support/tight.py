"""Every peer protocol with settings for short runs, so that they come to everything it does."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.protocols import PEERS
from paceline.protocols.settings import make_peer

TIGHT: dict[str, dict[str, Any]] = {
    "diloco": {"period": 3},
    "easgd": {"period": 2},
    "fedavg": {"period": 3},
    "hpsgd": {"round_length": 2},
    "local_sgd": {"period": 3},
    "osp": {"overlap": 0.6, "ramp": "constant", "rank_every": 2, "small_bytes": 0},
    "selsync": {"window": 2, "delta": 0.02},
}
REPEATING = [name for name in sorted(PEERS) if make_peer(name, TIGHT.get(name, {})).repeats]
"""Those that come to the same bits whoever is fast."""
every_peer = pytest.mark.parametrize("protocol", sorted(PEERS))
every_repeating = pytest.mark.parametrize("protocol", REPEATING)
every_model = pytest.mark.parametrize(
    "name",
    [
        "tied",
        "frozen",
        "two_types",
        "zero_first",
        "zero_between",
        "accumulated",
        "groups",
        "outside",
        "closure",
        "scaled",
    ],
)
"""Cases that differ in what a gradient is made of and what is trained."""
