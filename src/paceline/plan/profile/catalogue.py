"""Common GPUs and links, so that one can plan for a cluster that one does not have.

Rates are what a well-tuned training step reaches of the maker's peak: two fifths of it for matrix units
(fp16/bf16 with fp32 accumulation), seven tenths for plain fp32. They are round estimates to plan with, not
measurements: `paceline profile --cluster` measures. Link rates are four fifths of the nominal rate.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.plan.profile.units import GIB


class Gpu(NamedTuple):
    """A kind of device."""

    flops_per_s: float
    memory_bytes: int


class LinkKind(NamedTuple):
    """A kind of link: seconds per message, bytes per second and direction."""

    latency_s: float
    bytes_per_s: float


GPUS: dict[str, Gpu] = {
    "p100": Gpu(0.7 * 9.3e12, 16 * GIB),
    "v100-16gb": Gpu(0.4 * 112e12, 16 * GIB),
    "v100-32gb": Gpu(0.4 * 112e12, 32 * GIB),
    "t4": Gpu(0.4 * 65e12, 16 * GIB),
    "rtx-3090": Gpu(0.4 * 71e12, 24 * GIB),
    "rtx-4090": Gpu(0.4 * 165e12, 24 * GIB),
    "a10": Gpu(0.4 * 125e12, 24 * GIB),
    "l4": Gpu(0.4 * 121e12, 24 * GIB),
    "a100-40gb": Gpu(0.4 * 312e12, 40 * GIB),
    "a100-80gb": Gpu(0.4 * 312e12, 80 * GIB),
    "h100-80gb": Gpu(0.4 * 989e12, 80 * GIB),
}
WIRES: dict[str, LinkKind] = {
    "ethernet-1g": LinkKind(50e-6, 0.8 * 0.125e9),
    "ethernet-10g": LinkKind(30e-6, 0.8 * 1.25e9),
    "ethernet-25g": LinkKind(20e-6, 0.8 * 3.125e9),
    "ethernet-100g": LinkKind(15e-6, 0.8 * 12.5e9),
    "infiniband-hdr": LinkKind(5e-6, 0.8 * 25e9),
    "pcie-3": LinkKind(10e-6, 0.8 * 16e9),
    "pcie-4": LinkKind(10e-6, 0.8 * 32e9),
    "nvlink-2": LinkKind(5e-6, 0.8 * 150e9),
    "nvlink-3": LinkKind(5e-6, 0.8 * 300e9),
    "nvlink-4": LinkKind(5e-6, 0.8 * 450e9),
}
