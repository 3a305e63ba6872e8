"""Claims that no recipe tries yet: why, and what it would take."""

from __future__ import annotations

from paceline.bench.papers.recipe import Open

UNTRIED = (
    Open(
        name="ps_ddp_fsdp_eval",
        paper="DDP, FSDP and parameter servers (Ovi, 2025/26)",
        claim="asynchronous: up to 28 % less time, 4 to 17 points lost; FSDP: a quarter to a sixth of the "
        "memory",
        source="abstract of the second version",
        reason="it is compared in real processes, by a benchmark of its own: two of its six statements came "
        "out in their range, on small models and emulated devices (benchmarks/2026-11-18-strategies.md)",
        takes="`bench strategies`, about 25 minutes with three seeds",
    ),
    Open(
        name="osdp_large",
        paper="OSDP (Jiang et al., IJCAI 2023)",
        claim="2.78 times as fast as FSDP for 8 layers of OPT-30B's shape in 16 GB",
        source="the authors' repository, README",
        reason="the authors' profile of that model could not be had, and it does not fit this machine",
        takes="8 GPUs with 16 GB",
    ),
)
