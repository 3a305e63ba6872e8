"""Profiles as tables for people."""

from __future__ import annotations

from rich.table import Table

from paceline.plan.profile.cluster import KINDS, ClusterProfile
from paceline.plan.profile.model import ModelProfile
from paceline.plan.profile.units import size_text, time_text


def model_table(profile: ModelProfile) -> Table:
    """Operators in order."""
    batch = max(profile.batches, default=1)
    title = f"{profile.model}, {profile.optimizer}: {size_text(profile.parameter_bytes)} of parameters"
    table = Table(
        "operator", "kind", "parameters", "kept per sample", "Mflop per sample", f"time at batch {batch}",
        title=title, title_justify="left",
    )  # fmt: skip
    for column in table.columns[2:]:
        column.justify = "right"
    for op in profile.operators:
        table.add_row(
            op.name,
            op.kind,
            size_text(op.parameter_bytes),
            size_text(op.activation_bytes),
            f"{op.flops / 1e6:.3f}",
            time_text(op.seconds(batch)),
        )
    return table


def cluster_table(profile: ClusterProfile) -> Table:
    """Devices, then collectives."""
    table = Table("", "speed or rate", "memory or latency", "jitter", title="cluster", title_justify="left")
    for rank, device in enumerate(profile.devices):
        speed = f"{device.flops_per_s / 1e9:.1f} Gflop/s"
        table.add_row(f"{rank} {device.name}", speed, size_text(device.memory_bytes), f"{device.jitter:.0%}")
    for kind in KINDS if profile.size > 1 else ():
        line = profile.line(kind)
        how = "measured" if kind in profile.collectives else "ring"
        table.add_row(kind, f"{line.bytes_per_s / 1e6:.0f} MB/s", time_text(line.latency_s), how)
    return table
