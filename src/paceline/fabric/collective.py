"""Vectors between workers by torch.distributed: reductions over groups, and messages between pairs.

Workers find each other through a memory without a name (a memfd, as a `FileStore`), and gloo is bound to
the loopback interface: no port is open to others, and nothing is left behind, whoever was killed how.

There are several *lines*, each with groups of its own, because a group carries its reductions out in the
order in which they were begun: what is begun and waited for later must never hold up what is wanted now.

While a worker waits it looks up, ten times a second, whether the run is over (`look` raises then): the
death of a worker that is not a neighbour would otherwise be noticed by nobody but the run's owner.

For tensors on a GPU it is NCCL that reduces, over all workers; that has not been run on hardware. Smaller
groups and messages between pairs are gloo's alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ConfigError, RunError

LOOK_S = 0.1
"""How often a worker that waits for bytes looks up."""
TIMEOUT = timedelta(minutes=30)
"""How long a reduction may be under way, since some may begin it long before others do."""
PATIENCE_S = 10.0
"""How long a worker whose exchange broke off waits to be told whom the run has lost."""

G = TypeVar("G")
Ranks = tuple[int, ...]


class GroupLine(StrEnum):
    """What a group is for."""

    NOW = "now"
    """Operations that a worker waits for."""
    BUCKETS = "buckets"
    """Gradients, while backward goes on."""
    STARTED = "started"
    """What was started and is waited for later."""
    MODEL = "model"
    """The mean of all models, to be evaluated or saved."""


class Groups(Generic[G]):
    """Groups by line and members, each made once, by its members, when it is needed first."""

    def __init__(self, make: Callable[[GroupLine, Ranks], G]) -> None:
        self._make = make
        self._made: dict[tuple[GroupLine, Ranks], G] = {}

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, key: tuple[GroupLine, Ranks]) -> G:
        line, ranks = key[0], tuple(sorted(set(key[1])))
        if (line, ranks) not in self._made:
            self._made[line, ranks] = self._make(line, ranks)
        return self._made[line, ranks]


class Collective:
    """One worker's end of the fabric."""

    def __init__(
        self,
        rank: int,
        size: int,
        meeting: int,
        look: Callable[[], None],
        device: torch.device | None = None,
    ) -> None:
        """`meeting` is the descriptor of an empty memory, the same for all; all come here at once.
        `device` is where tensors lie, the CPU unless told otherwise."""
        if dist.is_initialized():
            raise ConfigError(
                "the script has called torch.distributed.init_process_group, and so would this fabric. "
                "Leave it out, or use --fabric shared."
            )
        backend = backend_for(device)
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        self.rank, self.everybody = rank, tuple(range(size))
        self._look, self._backend, self._meeting = look, backend, meeting
        if device is not None and backend == "nccl":
            torch.cuda.set_device(device)
        store = dist.FileStore(f"/proc/self/fd/{meeting}", size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        self._store = store
        self._devices = _devices() if backend == "gloo" else []
        self._groups: Groups[Any] = Groups(self._new_group)
        for line in GroupLine:
            _ = self._groups[line, self.everybody]
        self._waiter = ThreadPoolExecutor(1, "paceline-pairs")

    def close(self) -> None:
        """Let go of all groups."""
        self._waiter.shutdown(wait=False)
        dist.destroy_process_group()
        os.close(self._meeting)

    # -- reductions ---------------------------------------------------------------------------

    def reduce(self, flats: Sequence[Tensor], among: Ranks = (), line: GroupLine = GroupLine.NOW) -> None:
        """Let tensors be the sums of everybody's, the same bits for all. Among nobody in particular: all."""
        self.finish(self.begin(flats, among, line))

    def begin(self, flats: Sequence[Tensor], among: Ranks, line: GroupLine) -> list[Any]:
        """Begin to; the tensors must be left alone until it is finished."""
        group = self._groups[line, among or self.everybody]
        return [_begin(flat, group) for flat in flats if flat.numel()]

    def _new_group(self, line: GroupLine, ranks: Ranks) -> Any:
        """Only its members come to make it. Its name is that of line and members: torch's own names count the
        groups that a process has made, and differ where one has been in more of them than another. All share
        one device: each has a thread that wakes a hundred times a second, for nothing."""
        if self._backend != "gloo":
            require_gloo(self._backend, ranks == self.everybody)
            return dist.new_group(list(ranks), timeout=TIMEOUT, use_local_synchronization=True)
        name = f"{line}/{'-'.join(map(str, ranks))}"
        store = dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = self._devices, TIMEOUT
        return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), options)

    def finish(self, works: Sequence[Any]) -> None:
        """Wait until reductions are complete."""
        for work in works:
            while not self._complete(work):
                self._look()

    def _complete(self, work: Any) -> bool:
        """Whether it is, after at most a moment of waiting."""
        if self._backend != "gloo":
            time.sleep(0 if work.is_completed() else 1e-4)
            return bool(work.is_completed())
        try:
            work.wait(timedelta(seconds=LOOK_S))
        except RuntimeError:
            if not work.is_completed():
                return False
            self._all([work])  # it may have become complete since; if it broke off, this says so
        return True

    # -- pairs --------------------------------------------------------------------------------

    def mix(
        self, mine: Sequence[Tensor], row: Mapping[int, float], takers: Ranks, into: Sequence[Tensor]
    ) -> None:
        """The weighted sum of neighbours' tensors and one's own, in rank order; `takers` get one's own."""
        require_gloo(self._backend)
        for tag, (part, target) in enumerate(zip(mine, into, strict=True)):
            sent = [_send(part, other, tag) for other in takers if other != self.rank]
            self._add_up(part, row, target, tag)
            self._all(sent)

    def average(self, mine: Sequence[Tensor], row: Mapping[int, float], into: Sequence[Tensor]) -> None:
        """The weighted mean among those of `row`, by pairs: each adds up one piece and gives it to all."""
        require_gloo(self._backend)
        ranks = tuple(sorted(row))
        others = [other for other in ranks if other != self.rank]
        for part, target in zip(mine, into, strict=True):
            pieces = dict(zip(ranks, part.tensor_split(len(ranks)), strict=True))
            means = dict(zip(ranks, target.tensor_split(len(ranks)), strict=True))
            sent = [_send(pieces[other], other, 0) for other in others if pieces[other].numel()]
            if means[self.rank].numel():
                self._add_up(pieces[self.rank], row, means[self.rank], 0)
                sent += [_send(means[self.rank], other, 1) for other in others]
            self._all([*sent, *(_receive(means[r], r, 1) for r in others if means[r].numel())])

    def _add_up(self, part: Tensor, row: Mapping[int, float], target: Tensor, tag: int) -> None:
        """While one neighbour's is added, the next one's is on its way."""
        ranks = sorted(row)
        others = [rank for rank in ranks if rank != self.rank]
        memory = [torch.empty_like(part) for _ in others[:2]]
        coming = {other: _receive(memory[i], other, tag) for i, other in enumerate(others[:2])}
        target.zero_()
        for rank in ranks:
            if rank == self.rank:
                target.add_(part, alpha=row[rank])
                continue
            place = others.index(rank)
            self._all([coming.pop(rank)])
            target.add_(memory[place % 2], alpha=row[rank])
            if place + 2 < len(others):
                coming[others[place + 2]] = _receive(memory[place % 2], others[place + 2], tag)

    def _all(self, works: Sequence[Any]) -> None:
        """Wait for messages, in another thread: a wait of theirs that is cut short breaks connections."""
        future = self._waiter.submit(_wait_for, works)
        while True:
            try:
                return future.result(LOOK_S)
            except NotYet:
                self._look()
            except RuntimeError as error:
                raise Torn(f"an exchange broke off: {_first_line(error)}") from None


class Torn(RunError):
    """An exchange broke off, most likely because another worker is gone."""


def backend_for(device: torch.device | None) -> Literal["gloo", "nccl"]:
    """Who reduces tensors that lie there."""
    if device is None or device.type == "cpu":
        return "gloo"
    if device.type == "cuda":
        return "nccl"
    raise ConfigError(
        f"the model is on {device}; workers exchange vectors on the CPU (gloo) or on CUDA GPUs (NCCL) only. "
        "Use a paced protocol, such as bsp."
    )


def require_gloo(backend: str, possible: bool = False) -> None:
    """Refuse what only gloo can do: messages between pairs, and groups that not all are in."""
    if backend != "gloo" and not possible:
        raise ConfigError(
            f"over {backend} workers can only average over all, not mix with neighbours or in smaller "
            "groups. Use a model on the CPU, or a protocol that averages over all, such as allreduce."
        )


def _wait_for(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _send(tensor: Tensor, other: int, tag: int) -> Any:
    return dist.isend(tensor, other, tag=tag)


def _receive(tensor: Tensor, other: int, tag: int) -> Any:
    return dist.irecv(tensor, other, tag=tag)


def _devices() -> list[Any]:
    return [dist.ProcessGroupGloo.create_device(interface="lo")]


def _begin(flat: Tensor, group: Any) -> Any:
    if isinstance(group, dist.ProcessGroup):
        return dist.all_reduce(flat, group=group, async_op=True)
    return group.allreduce([flat])


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
