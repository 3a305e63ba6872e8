"""A cluster's profile: how fast each device is, how much it holds, how long collectives take.

    [[device]]
    kind = "a100-40gb"        # from the catalogue, or give flops_per_s and memory
    count = 4
    [[device]]
    name = "old"
    count = 4
    flops_per_s = 4.0e12
    memory = "16GiB"

    [link]
    kind = "ethernet-25g"     # or latency_s and bytes_per_s

A collective of S bytes among N devices takes a ring's time, (N-1) * (latency + S/N / rate), twice that for an
all-reduce. Measured collectives (`[collectives.all_gather] latency_s, bytes_per_s`) take their place.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from paceline.errors import ConfigError, unknown
from paceline.plan.profile.catalogue import GPUS, WIRES
from paceline.plan.profile.files import checked, read_table
from paceline.plan.profile.units import MIB, parse_size

Kind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "gather_grouped", "scatter_grouped"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_DEVICES = 4096
OVERHEAD = 800 * MIB
"""What a GPU's context and communication buffers take, if nobody says otherwise."""


class TransferCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What moving bytes takes: so long, and so much per byte."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and self.bytes_per_s > 0):
            raise ValueError(f"a link has latency_s >= 0 and bytes_per_s > 0, got {self}")

    def seconds(self, size_bytes: float) -> float:
        """Of one transfer."""
        return self.latency_s + size_bytes / self.bytes_per_s


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker's device."""

    name: str
    flops_per_s: float
    memory_bytes: int
    jitter: float = 0.0
    """Relative spread of the same work's time."""

    def __post_init__(self) -> None:
        if not (0 < self.flops_per_s < math.inf and self.memory_bytes > 0 and self.jitter >= 0):
            raise ValueError(f"device {self.name!r} needs flops_per_s > 0 and memory > 0, got {self}")


class ClusterProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What `paceline profile --cluster` writes, or a file gives."""

    devices: tuple[Device, ...]
    link: TransferCost
    collectives: dict[Kind, TransferCost] = {}
    """Measured among just these devices: seconds of a collective on so many bytes in all."""
    low: dict[Kind, TransferCost] = {}
    """The same, where one in ten repeats took less."""
    high: dict[Kind, TransferCost] = {}
    """The same, where one in ten repeats took longer."""
    overhead_bytes: int = OVERHEAD
    """Taken on every device before the first tensor: context, kernels, communication buffers."""
    source: str = "given"
    host: str = ""
    """The machine that was measured, if one was."""
    slow: dict[int, float] = {}
    """Ranks that were counted as so many times slower than measured (`--slow`)."""

    @property
    def size(self) -> int:
        """How many devices."""
        return len(self.devices)

    @property
    def memory_bytes(self) -> int:
        """Of the smallest device."""
        return min(device.memory_bytes for device in self.devices)

    @property
    def slowest_flops_per_s(self) -> float:
        """In lockstep the slowest device sets the pace."""
        return min(device.flops_per_s for device in self.devices)

    def at(self, ends: dict[Kind, TransferCost]) -> ClusterProfile:
        """With collectives at one end of what was measured, `low` or `high`."""
        return msgspec.structs.replace(self, collectives=self.collectives | ends)

    def line(self, kind: Kind) -> TransferCost:
        """Latency and rate of a collective, S being the bytes of the whole tensor."""
        n = self.size
        if n == 1:
            return TransferCost(latency_s=0.0, bytes_per_s=math.inf)
        if kind in self.collectives:
            return self.collectives[kind]
        times = {"all_reduce": 2.0, "all_to_all": 1.0 / n}.get(kind, 1.0)
        rate = self.link.bytes_per_s * n / ((n - 1) * times)
        rounds = 2.0 if kind == "all_reduce" else 1.0
        return TransferCost(latency_s=rounds * (n - 1) * self.link.latency_s, bytes_per_s=rate)

    def with_workers(self, count: int) -> ClusterProfile:
        """The same kind of devices, another number of them: only where all are equal."""
        if count == self.size:
            return self
        if len({(d.flops_per_s, d.memory_bytes) for d in self.devices}) > 1:
            raise ConfigError(
                f"the cluster has {self.size} unequal devices, so it is not clear which {count} are meant. "
                "Write a cluster file with the devices of the run."
            )
        if self.collectives:
            raise ConfigError(
                f"collectives were measured among {self.size} devices, not {count}. Measure again with "
                f"`paceline profile --cluster --workers {count}`."
            )
        return msgspec.structs.replace(self, devices=(self.devices[0],) * count)


def load_cluster_profile(path: Path) -> ClusterProfile:
    """Read a measured profile (JSON), or a file of devices and a link as in this module's docstring."""
    table = read_table(path, "cluster file")
    if not isinstance(table, dict):
        raise ConfigError(f"the cluster file {path} holds no table. See `paceline plan --help`.")
    if "devices" in table:
        return checked(table, ClusterProfile, path, "cluster file")
    return _assembled(table, path)


def _assembled(table: dict[str, Any], path: Path) -> ClusterProfile:
    for key in table:
        if key not in ("device", "link", "collectives"):
            raise unknown(f"entry of the cluster file {path}", key, ("device", "link", "collectives"))
    entries = table.get("device")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"the cluster file {path} has no [[device]]. Give at least one, with kind and count."
        )
    devices = [device for entry in entries for device in _devices(entry, path)]
    if len(devices) > MOST_DEVICES:
        raise ConfigError(
            f"the cluster file {path} has {len(devices)} devices; at most {MOST_DEVICES} are planned for."
        )
    collectives = checked(table.get("collectives", {}), dict[Kind, TransferCost], path, "cluster file")
    if "link" not in table and len(devices) > 1:
        raise ConfigError(
            f"the cluster file {path} has no [link]. Give kind (such as 'ethernet-25g'), or latency_s and "
            "bytes_per_s."
        )
    link = _link(table.get("link", {"kind": "pcie-4"}), path)
    return ClusterProfile(devices=tuple(devices), link=link, collectives=collectives)


def _devices(entry: dict[str, Any], path: Path) -> list[Device]:
    known = {"kind", "name", "count", "flops_per_s", "memory", "jitter"}
    for key in entry:
        if key not in known:
            raise unknown(f"entry of a device in {path}", key, known)
    kind = entry.get("kind")
    if kind is not None and str(kind).lower() not in GPUS:
        raise unknown(f"device in {path}:", str(kind), GPUS)
    base = None if kind is None else GPUS[str(kind).lower()]
    speed = entry.get("flops_per_s", base and base.flops_per_s)
    memory = entry.get("memory", base and base.memory_bytes)
    if speed is None or memory is None:
        raise ConfigError(f"a device in {path} has no kind, so it needs flops_per_s and memory. Got {entry}.")
    count = entry.get("count", 1)
    if not isinstance(count, int) or not 1 <= count <= MOST_DEVICES:
        raise ConfigError(f"count of a device in {path} must be 1 to {MOST_DEVICES}, got {count!r}.")
    device = {
        "name": str(entry.get("name", kind or "device")),
        "flops_per_s": speed,
        "memory_bytes": parse_size(memory, f"memory of a device in {path}"),
        "jitter": entry.get("jitter", 0.0),
    }
    return [checked(device, Device, path, "cluster file")] * count


def _link(entry: dict[str, Any], path: Path) -> TransferCost:
    kind = entry.get("kind")
    if kind is None:
        return checked(entry, TransferCost, path, "cluster file")
    if str(kind).lower() not in WIRES:
        raise unknown(f"link in {path}:", str(kind), WIRES)
    wire = WIRES[str(kind).lower()]
    given = {key: value for key, value in entry.items() if key != "kind"}
    return checked(wire._asdict() | given, TransferCost, path, "cluster file")


def equal_cluster(count: int, kind: str, wire: str) -> ClusterProfile:
    """So many devices of one kind of the catalogue."""
    if kind.lower() not in GPUS:
        raise unknown("device", kind, GPUS)
    if wire.lower() not in WIRES:
        raise unknown("link", wire, WIRES)
    gpu = GPUS[kind.lower()]
    device = Device(name=kind.lower(), flops_per_s=gpu.flops_per_s, memory_bytes=gpu.memory_bytes)
    link = TransferCost(**WIRES[wire.lower()]._asdict())
    return ClusterProfile(devices=(device,) * count, link=link, source="catalogue")
