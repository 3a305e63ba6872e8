"""Hosts, work and rules of the comparison with rivals: what is the same for everybody."""

from __future__ import annotations

import msgspec

from paceline_bench.cluster.scene import UNEQUAL, Scene

DIGITS = msgspec.structs.replace(
    UNEQUAL,
    name="digits",
    task="digits",
    device_s=0.06,
    batch=16,
    lr=0.1,
    warmup=256,
    every=256,
    tests=360,
    targets=(0.93,),
    limit_s=40.0,
)
IMAGES = msgspec.structs.replace(UNEQUAL, name="cifar10", targets=(0.42,))
KILL = msgspec.structs.replace(DIGITS, name="killed", epochs=3, targets=(), limit_s=60.0)
"""A job with an end, in the middle of which a worker is killed."""
VICTIM = 1
"""Its rank: neither the first, nor the one with the slow device, nor the one with the slow link."""
QUICK = msgspec.structs.replace(
    DIGITS,
    name="quick",
    links_mbit={"a": 1000, "b": 100},
    slow={0: 2.0},
    device_s=0.01,
    every=64,
    tests=50,
    targets=(0.0,),
    limit_s=10.0,
)
QUICK_KILL = msgspec.structs.replace(QUICK, name="quick, killed", epochs=1, targets=(), limit_s=100.0)


def scenes(quick: bool, images: bool, targets: tuple[float, ...]) -> tuple[Scene, Scene]:
    """The one to an accuracy, and the one in which somebody is killed."""
    if quick:
        return QUICK, QUICK_KILL
    trained = IMAGES if images else DIGITS
    return (msgspec.structs.replace(trained, targets=targets) if targets else trained), KILL
