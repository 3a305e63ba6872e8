"""The mesh of a run: the grid of its workers, with torch's DeviceMesh and its process groups underneath.

A script gets it from `pace.mesh(data=2, stage=4)`. Groups are gloo's, over the loopback interface of one
machine: gloo does not ask who connects, so a mesh does not leave the machine. (For tensors on a GPU the
groups are NCCL's; that has not been run on hardware.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ConfigError
from paceline.fabric.collective import backend_for
from paceline.protocols.grid import Grid

TIMEOUT = timedelta(minutes=30)
"""A worker may wait for long: while another evaluates, or reads its data. Deaths are noticed elsewhere."""


class Mesh(Grid):
    """One worker's view of the mesh."""

    def __init__(self, axes: Mapping[str, int], rank: int, device_mesh: DeviceMesh) -> None:
        super().__init__(axes, rank)
        self.device_mesh = device_mesh
        """torch's own, for whatever works on one: DTensor, FSDP, distributed checkpoints."""

    def group(self, axis: str) -> Any:
        """The process group of the line along an axis that this worker is on."""
        if axis not in self.axes:
            raise ConfigError(f"the mesh has no axis {axis!r}, only {', '.join(self.axes)}.")
        return self.device_mesh.get_group(axis)


def connect(axes: Mapping[str, int], rank: int, meeting: int, device: torch.device | None = None) -> Mesh:
    """All workers of the run come here at once. `meeting` is the descriptor of an empty memory, the same for
    all, through which they find each other: no port has a name that others could guess, and none is left."""
    if dist.is_initialized():
        raise ConfigError(
            "the script has called torch.distributed.init_process_group, and a mesh would do so too. Leave "
            "it out: mesh.group(axis) gives the groups."
        )
    grid = Grid(axes, rank)
    backend = backend_for(device)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"/proc/self/fd/{meeting}", grid.count)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=grid.count, timeout=TIMEOUT)
    places = torch.arange(grid.count).reshape(tuple(grid.axes.values()))
    kind = "cpu" if backend == "gloo" else "cuda"
    return Mesh(axes, rank, DeviceMesh(kind, places, mesh_dim_names=tuple(grid.axes)))
