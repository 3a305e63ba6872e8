"""The gradient's average begins while backward goes on, bucket by bucket, last parameters first.

A hook tells when a parameter's gradient is complete; a bucket whose gradients all are is copied, times its
share, and sent off. Buckets go in a fixed order, the same on all workers. The gradients themselves stay
what they are until the step: whoever accumulates over several batches, clips or scales them changes them
after they were sent off, which their version counters tell, and some of their numbers where these do not
(a gradient scaler leaves the counters alone). What was sent is then thrown away and averaged anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.fabric.collective import Collective, GroupLine
from paceline.runtime.peer.collective.slab import Slab
from paceline.store.layout import Layout, Region

FIRST_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""As in DistributedDataParallel: a small one first, so that something travels soon."""
PROBES = 16
"""Numbers of a gradient by which it is known again."""


class Bucket(msgspec.Struct, frozen=True):
    """A stretch of one dtype's gradients."""

    region: int
    start: int
    """Bytes from the region's start."""
    stop: int
    members: tuple[int, ...]
    """The trained parameters in it."""

    def cut(self, flats: Sequence[Tensor]) -> Tensor:
        """Its stretch of a vector."""
        flat = flats[self.region]
        size = flat.element_size()
        return flat[self.start // size : self.stop // size]


def plan(layout: Layout, first_bytes: int = FIRST_BYTES, each_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """The buckets of a model, in the order they are sent off."""
    buckets: list[Bucket] = []
    for number in reversed(range(len(layout.regions))):
        region = layout.regions[number]
        members: list[int] = []
        stop = region.size_bytes
        for index, start in reversed(_starts(layout, region)):
            members.append(index)
            if start == 0 or stop - start >= (each_bytes if buckets else first_bytes):
                buckets.append(Bucket(number, start, stop, tuple(members)))
                members, stop = [], start
        if members:  # parameters without any number, before the first that has one
            buckets.append(Bucket(number, 0, stop, tuple(members)))
    return buckets


def _starts(layout: Layout, region: Region) -> list[tuple[int, int]]:
    """A region's trained parameters, and where each starts in it."""
    places = [(index, slot.gradient) for index, slot in enumerate(layout.trained)]
    end = region.gradients + region.size_bytes
    here = [(index, at) for index, at in places if at is not None and region.gradients <= at < end]
    return [(index, at - region.gradients) for index, at in here]


def probes(layout: Layout, bucket: Bucket) -> Tensor:
    """Where to look in a bucket: some places in every gradient."""
    region = layout.regions[bucket.region]
    places = [torch.zeros(0, dtype=torch.long)]
    for slot in (layout.trained[index] for index in bucket.members):
        numbers = torch.Size(slot.shape).numel()
        if slot.gradient is not None and numbers:
            start = (slot.gradient - region.gradients - bucket.start) // (slot.size_bytes // numbers)
            places.append(start + torch.linspace(0, numbers - 1, min(numbers, PROBES)).long())
    return torch.cat(places)


class Buckets:
    """One worker's: what of this iteration's gradient is under way."""

    def __init__(
        self,
        layout: Layout,
        gradients: Sequence[tuple[Tensor, Tensor]],
        flats: Sequence[Tensor],
        collective: Collective,
        slab: Slab,
        share: Callable[[], float],
    ) -> None:
        """Trained parameters and their gradients' views; `flats` are the latter as long tensors. `share`
        tells what the gradient counts, before anybody knows what the others' do."""
        self.on = True
        self._plan = plan(layout)
        self._where = {index: n for n, bucket in enumerate(self._plan) for index in bucket.members}
        self._probes = [probes(layout, bucket) for bucket in self._plan]
        self._gradients = gradients
        self._mine = [bucket.cut(flats) for bucket in self._plan]
        self._there = [bucket.cut(slab.flats()) for bucket in self._plan]
        self._collective, self._slab, self._share = collective, slab, share
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, (parameter, _) in enumerate(gradients)
        ]
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._works: list[Any] = []
        self._fired: set[int] = set()
        self._left = [len(bucket.members) for bucket in self._plan]
        self._sent: dict[int, int] = {}
        self._shares: set[float] = set()
        self._looks: list[Tensor] = []
        self._spoilt = False

    # -- while backward goes on ---------------------------------------------------------------

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda parameter: self._complete(index, parameter)

    def _complete(self, index: int, parameter: Tensor) -> None:
        """A gradient is there; with its whole bucket, it leaves."""
        if not self.on:
            return
        view = self._gradients[index][1]
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
            parameter.grad = view
        if index in self._fired:
            self._spoilt = True
            return
        self._fired.add(index)
        self._left[self._where[index]] -= 1
        while len(self._works) < len(self._plan) and self._left[len(self._works)] == 0:
            self._send()

    def _send(self) -> None:
        """The next bucket leaves as it is now."""
        number, share = len(self._works), self._share()
        torch.mul(self._mine[number], share, out=self._there[number])
        self._shares.add(share)
        self._looks.append(self._look(number))
        self._sent |= {index: self._gradients[index][1]._version for index in self._plan[number].members}
        self._works.append(self._collective.begin([self._there[number]], (), GroupLine.BUCKETS))

    def _look(self, number: int) -> Tensor:
        return self._mine[number][self._probes[number]]

    def spoil(self) -> None:
        """The gradients are no longer those that were sent."""
        self._spoilt |= bool(self._works)

    # -- at the step --------------------------------------------------------------------------

    def send_rest(self) -> bool:
        """Backward is over: what had no gradient leaves, too. Whether all that left is still what it was."""
        while len(self._works) < len(self._plan):
            self._send()
        same = all(self._gradients[index][1]._version == seen for index, seen in self._sent.items())
        return same and not self._spoilt and self._shares <= {self._share()} and self._looks_the_same()

    def _looks_the_same(self) -> bool:
        """Bit for bit, NaN included."""
        pairs = [(before, self._look(number)) for number, before in enumerate(self._looks)]
        return all(torch.equal(before.view(torch.uint8), now.view(torch.uint8)) for before, now in pairs)

    @property
    def blind(self) -> bool:
        """Whether there are only zeros to see, by which nobody can tell."""
        return not any(bool(look.any()) for look in self._looks)

    def finish(self) -> None:
        """Wait until the sums of all buckets are in the slab."""
        for works in self._works:
            self._collective.finish(works)
        self._begin_anew()

    def stand(self) -> None:
        """Take part with nothing."""
        self._slab.clear()
        for there in self._there:
            self._collective.reduce([there], (), GroupLine.BUCKETS)

    def stop(self) -> None:
        """From now on backward only computes."""
        self.on = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
