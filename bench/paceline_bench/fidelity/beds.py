"""The testbeds on which simulated and measured samples/s are compared.

Two are those of the benchmark of a small cluster. The third has a slow link to the first host. With a store,
or a place where peers meet, all bytes cross that link: nowhere else do transfers share as much, so a model of
links that is wrong about sharing is furthest off there. Two racks would share an uplink in the same way,
between fewer transfers; a testbed has one switch, so they are left to the simulator.
"""

from __future__ import annotations

import msgspec

from paceline_bench.cluster.scene import SCENES, Scene

LIMIT_S = 4.5
FASTEST = 1750
"""Samples/s that nobody exceeds here: four devices that never wait have 1707."""
NEVER = 1_000_000_000


def _timed(name: str, scene: Scene) -> Scene:
    """The same hosts, and work whose only result is how long it took."""
    return msgspec.structs.replace(
        scene,
        name=name,
        task="times",
        lr=0.001,
        every=NEVER,
        targets=(),
        limit_s=LIMIT_S,
        limit_samples=round(LIMIT_S * FASTEST),
    )


EQUAL = SCENES["equal"]
BEDS = {
    "unequal": _timed("unequal", SCENES["unequal"]),
    "equal": _timed("equal", EQUAL),
    "slow_first": _timed(
        "slow_first",
        msgspec.structs.replace(
            EQUAL, links_mbit={host: 100.0 if host == "a" else 1000.0 for host in "abcd"}
        ),
    ),
}
QUICK_BED = msgspec.structs.replace(
    BEDS["slow_first"],
    name="quick",
    links_mbit={"a": 100.0, "b": 1000.0},
    device_s=0.05,
    limit_s=1.0,
    limit_samples=3000,
)
