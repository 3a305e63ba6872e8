"""Virtual time: what a protocol does to a cluster of any size, without the cluster."""

from __future__ import annotations

from paceline.sim.cluster import Cluster, Drift, Group, Membership, Stall, Transient
from paceline.sim.compute import Exponential, Fixed, HalfNormal, Lognormal, Normal, Pareto, Recorded
from paceline.sim.network.links import Host, Link
from paceline.sim.peers import simulate_peers
from paceline.sim.simulate import simulate
from paceline.sim.timing import Timing
from paceline.sim.toml import load_cluster

__all__ = [
    "Cluster",
    "Drift",
    "Exponential",
    "Fixed",
    "Group",
    "HalfNormal",
    "Host",
    "Link",
    "Lognormal",
    "Membership",
    "Normal",
    "Pareto",
    "Recorded",
    "Stall",
    "Timing",
    "Transient",
    "load_cluster",
    "simulate",
    "simulate_peers",
]
