"""All-reduce: every gradient is averaged over all workers before any of them steps.

Paper: Valiant, "A Bridging Model for Parallel Computation", CACM 1990, without a server; as in
PyTorch's DistributedDataParallel (Li et al., VLDB 2020).

Promise: no staleness; every step equals one process that trains on the batches of all workers as one batch.

When: workers are equal, links are fast, and steps must equal those of one process with the whole batch.

Invariant: all replicas are equal after every iteration. The mean is weighted by the samples behind each
gradient, so uneven batches change nothing. Unlike `bsp`, any optimizer works, because every worker has its
own. If memory is shared and the optimizer is one of torch's, the equal replicas are kept as one model that is
stepped once for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.protocols.core.operations import Average, Compute, Step, Steps
from paceline.protocols.core.peer import Me, Peer


@dataclass(frozen=True, slots=True)
class AllReduce(Peer):
    agrees: ClassVar[bool] = True
    overlaps: ClassVar[bool] = True
    in_unison: ClassVar[bool] = True

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        mean = yield Average(gradient, weight=me.samples)
        yield Step(mean)
