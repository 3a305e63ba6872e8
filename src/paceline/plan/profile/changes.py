"""What differs between the cluster that a plan was made for and the one that it is to run on."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.plan.profile.cluster import KINDS, ClusterProfile
from paceline.plan.profile.units import size_text

SPEED, RATE = 0.1, 0.25
"""How far a device's speed and a collective's rate may be off, relative: measurements are."""
SHOWN = 3


def check_cluster(planned: ClusterProfile, now: ClusterProfile) -> None:
    """Refuse to go on with another cluster, and say what differs."""
    found = differences(planned, now)
    if found:
        more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ConfigError(
            f"the cluster is not the one that was planned for: {'; '.join(found[:SHOWN])}{more}. Plan again "
            "for the cluster as it is."
        )


def differences(planned: ClusterProfile, now: ClusterProfile) -> list[str]:
    """In words, one for each."""
    if planned.size != now.size:
        return [f"it has {now.size} devices, planned were {planned.size}"]
    return [*_devices(planned, now), *_links(planned, now), *_slowed(planned, now.slow)]


def _devices(planned: ClusterProfile, now: ClusterProfile) -> list[str]:
    found = []
    for rank, (then, is_) in enumerate(zip(planned.devices, now.devices, strict=True)):
        if abs(is_.flops_per_s - then.flops_per_s) > SPEED * then.flops_per_s:
            speeds = f"{is_.flops_per_s / 1e9:.3g} Gflop/s, planned {then.flops_per_s / 1e9:.3g}"
            found.append(f"device {rank} computes {speeds}")
        if is_.memory_bytes < then.memory_bytes * (1 - SPEED):
            sizes = f"{size_text(is_.memory_bytes)}, planned {size_text(then.memory_bytes)}"
            found.append(f"device {rank} holds {sizes}")
    return found


def _links(planned: ClusterProfile, now: ClusterProfile) -> list[str]:
    found = []
    for kind in KINDS if planned.size > 1 else ():
        then, is_ = planned.line(kind).bytes_per_s, now.line(kind).bytes_per_s
        if abs(is_ - then) > RATE * then:
            found.append(f"{kind} moves {is_ / 1e6:.3g} MB/s, planned {then / 1e6:.3g}")
    return found


def _slowed(planned: ClusterProfile, slow: dict[int, float]) -> list[str]:
    found = []
    for rank in sorted({*planned.slow, *slow}):
        then, is_ = planned.slow.get(rank, 1.0), slow.get(rank, 1.0)
        if then != is_:
            found.append(f"rank {rank} is slowed by {is_:g}, planned {then:g} (--slow {rank}:{then:g})")
    return found


def check_here(planned: ClusterProfile, host: str, slow: dict[int, float], peak: int, left: int) -> None:
    """Refuse to run a plan that was measured on another machine, for other slow ranks, or that does not fit
    any more. `peak`: bytes that each worker takes; `left`: bytes that there are for each."""
    if planned.host and planned.host != host:
        raise ConfigError(
            f"the cluster is not the one that was planned for: this machine is {host}; planned was "
            f"{planned.host}. Plan again here."
        )
    if planned.host and (found := _slowed(planned, slow)):
        raise ConfigError(f"the cluster is not the one that was planned for: {'; '.join(found[:SHOWN])}.")
    if peak > left:
        raise ConfigError(
            f"the plan takes {size_text(peak)} per worker at its peak, and this machine has "
            f"{size_text(left)} left for each. Plan again with --memory, or free some."
        )
