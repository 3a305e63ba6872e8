"""A plan runs on the cluster that it was made for, and on no other."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.errors import ConfigError
from paceline.plan.profile import ClusterProfile, Device, TransferCost, load_cluster_profile
from paceline.plan.profile.changes import check_cluster, check_here, differences
from paceline.plan.profile.files import write_json
from paceline.plan.profile.units import GIB

PLANNED = ClusterProfile(
    devices=(Device(name="d", flops_per_s=2e9, memory_bytes=8 * GIB),) * 3,
    link=TransferCost(latency_s=1e-4, bytes_per_s=1e8),
    host="a machine",
    slow={1: 2.0},
)


def changed(rank: int, **fields: object) -> ClusterProfile:
    devices = list(PLANNED.devices)
    devices[rank] = msgspec.structs.replace(devices[rank], **fields)
    return msgspec.structs.replace(PLANNED, devices=tuple(devices))


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (msgspec.structs.replace(PLANNED, devices=PLANNED.devices[:2]), "has 2 devices, planned were 3"),
        (changed(2, flops_per_s=1e9), "device 2 computes 1 Gflop/s, planned 2"),
        (changed(0, memory_bytes=4 * GIB), r"device 0 holds 4.00 GiB, planned 8.00 GiB"),
        (
            msgspec.structs.replace(PLANNED, link=TransferCost(latency_s=1e-4, bytes_per_s=1e7)),
            "all_gather moves",
        ),
        (msgspec.structs.replace(PLANNED, slow={}), "rank 1 is slowed by 1, planned 2"),
    ],
)
def test_another_cluster_is_refused_and_it_says_what_differs(now: ClusterProfile, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_cluster(PLANNED, now)


def test_the_same_cluster_measured_again_and_one_with_more_memory_are_accepted() -> None:
    assert differences(PLANNED, PLANNED) == []
    assert differences(PLANNED, changed(1, flops_per_s=2.1e9, memory_bytes=16 * GIB)) == []


def test_another_machine_other_slow_ranks_and_too_little_memory_are_refused() -> None:
    check_here(PLANNED, "a machine", {1: 2.0}, peak=1, left=1)
    with pytest.raises(ConfigError, match="this machine is another; planned was a machine"):
        check_here(PLANNED, "another", {1: 2.0}, 1, 1)
    with pytest.raises(ConfigError, match="rank 0 is slowed by 3, planned 1"):
        check_here(PLANNED, "a machine", {0: 3.0, 1: 2.0}, 1, 1)
    with pytest.raises(ConfigError, match=r"takes 2.00 GiB per worker at its peak.* has 1.00 GiB left"):
        check_here(PLANNED, "a machine", {1: 2.0}, 2 * GIB, GIB)


def test_a_cluster_with_slow_ranks_is_read_from_the_file_it_was_written_to(tmp_path: Path) -> None:
    write_json(tmp_path / "cluster.json", PLANNED)
    assert load_cluster_profile(tmp_path / "cluster.json") == PLANNED
