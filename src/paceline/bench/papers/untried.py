"""Claims that no recipe tries: by which other benchmark they are tried, or why not and what it would take."""

from __future__ import annotations

from paceline.bench.papers.recipe import Open

UNTRIED = (
    Open(
        name="ps_ddp_fsdp_eval",
        paper="DDP, FSDP and parameter servers (Ovi, 2025/26)",
        claim="asynchronous: up to 28 % less time, 4 to 17 points lost; FSDP: a quarter to a sixth of the "
        "memory",
        source="abstract of the second version",
        reason="six findings, each in or out of its published range, in real processes with all strategies "
        "side by side, on small stand-ins for the models and emulated devices. The most time was saved on "
        "throttled links; accuracy is that after 80 steps, when stale gradients with momentum do most harm; "
        "small models have more activations than weights, so that sharding weights saves less memory",
        takes="`paceline bench strategies`, about 25 minutes with three seeds",
        benchmark="strategies",
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
