"""The mesh of a run: the grid of its workers, with torch's DeviceMesh and its process groups underneath.

A script gets it from `pace.mesh(data=2, stage=4)`. Groups are gloo's, over the loopback interface of one
machine: gloo does not ask who connects, so a mesh does not leave the machine. (For tensors on a GPU the
groups are NCCL's; that has not been run on hardware.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ConfigError
from paceline.fabric.collective import backend_for
from paceline.protocols.grid import Grid
from paceline.trace.events import Lookups

TIMEOUT = timedelta(minutes=30)
"""A worker may wait for long: while another evaluates, or reads its data. Deaths are noticed elsewhere."""


class Share:
    """What a way of splitting a model says of its axis to a run with an ordinary loop (`mesh.split`)."""

    def __init__(self, axis: str, *, apart: bool = False) -> None:
        self.axis = axis
        self.apart = apart
        """Whether workers along it have batches of their own, as copies have; else they share each batch."""

    def begin(self) -> None:
        """Training is about to begin: the model is there, and random numbers are drawn from here on."""

    def combine(self, samples: int) -> None:
        """A step's gradients are there, of so many samples: put together what lies along the axis."""

    def settle(self) -> None:
        """Before copies are evaluated or saved: bring to an end what is under way; all workers do."""

    def left_out(self) -> tuple[int, int]:
        """Parameters of the whole model that `model.parameters()` leaves out, and their bytes."""
        return 0, 0

    def lookups(self) -> Lookups | None:
        """What looking up in tables has cost since the last time; None: there are no tables."""
        return None


class Mesh(Grid):
    """One worker's view of the mesh."""

    def __init__(self, axes: Mapping[str, int], rank: int, device_mesh: DeviceMesh) -> None:
        super().__init__(axes, rank)
        self.device_mesh = device_mesh
        """torch's own, for whatever works on one: DTensor, FSDP, distributed checkpoints."""
        self.shares: dict[str, Share] = {}
        """What splits the model along which axis."""
        self.chosen: object | None = None
        """The protocol that splits the model, with its settings, if the run names one."""
        self.sent: Callable[[str, int], None] = lambda axis, size_bytes: None
        """Is told of bytes that go along an axis."""
        self.exchanges: dict[str, int] = {}
        """How many exchanges there were along each axis, in which all of a line meet."""
        self.waited_s = 0.0
        """Time spent in them."""

    def split(self, share: Share) -> None:
        """A model is split along an axis, once."""
        if share.axis in self.shares:
            raise ConfigError(f"a model is split along {share.axis!r} already. Split it once, as a whole.")
        self.shares[share.axis] = share

    @contextmanager
    def exchange(self, axis: str, size_bytes: int) -> Iterator[None]:
        """Put it around whatever is exchanged along an axis; `size_bytes`: what this worker sends of it."""
        began = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - began
        self.exchanges[axis] = self.exchanges.get(axis, 0) + 1
        self.sent(axis, size_bytes)

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


def mean_along(mesh: Mesh, axis: str, parameters: Sequence[torch.nn.Parameter], samples: int) -> int:
    """Gradients become their mean over an axis, by samples; answers those of all. None for all stays."""
    if mesh.size(axis) == 1 or not parameters:
        return samples
    if len({p.dtype for p in parameters}) > 1:
        raise ConfigError("the model has parameters of several types besides its tables. Use one type.")
    given = [(p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) * samples) for p in parameters]
    there = torch.tensor([float(p.grad is not None) for p in parameters] + [samples], dtype=given[0].dtype)
    flat = torch.cat([*given, there])
    count = mesh.size(axis)
    with mesh.exchange(axis, 2 * (count - 1) * flat.numel() * flat.element_size() // count):
        dist.all_reduce(flat, group=mesh.group(axis))
    *sums, told = torch.split(flat, [*(p.numel() for p in parameters), len(there)])
    *named, total = told.tolist()
    for p, summed, known in zip(parameters, sums, named, strict=True):
        p.grad = (summed / max(total, 1.0)).view_as(p) if known else None
    return int(total)


def gather_bytes(data: bytes, size: int, group: Any = None) -> list[bytes]:
    """What all workers of a group give, by rank; all of them come here."""
    lengths = torch.zeros(size, dtype=torch.int64)
    dist.all_gather(list(torch.split(lengths, 1)), torch.tensor([len(data)]), group=group)
    longest = int(lengths.max())
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else own[:0]
    rows = torch.zeros(size, longest, dtype=torch.uint8)
    if longest:
        dist.all_gather(list(rows.unbind()), own, group=group)
    return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]
