"""What each strategy takes, by formula: bytes of memory and of traffic per worker, samples per second.

Paper: Ovi, "Performance Characterization of Distributed Deep Learning Strategies", arXiv 2505.12832. We know
no formulas of its own; these count parameters (P bytes), gradients (P), optimizer state (s copies of P) and
activations (A) for N workers. `u` is the largest layer, which FSDP gathers whole.

    strategy       memory of a worker            bytes that a worker sends per step
    single         (2 + s) P + A                 0
    ddp            (3 + s) P + A                 2 (N-1)/N P
    fsdp           (2 + s) P/N + 3 u + A         3 (N-1)/N P
    ps-*           3 P + A  (state in the store) P, and P comes back

DDP's third copy beside its state are its buckets. The third of a store's worker is what it has in transit.
`bench strategies` measured peaks of 0.92 to 1.02 (DDP) and 0.91 to 1.03 times these, for five models. Without
the third copies it was 1.20 to 1.35 and 1.30 to 1.48 times.

Time is not overlapped with communication: the figures are what can be promised, not the best case.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from paceline.plan.profile import ClusterProfile, ModelProfile

Strategy = Literal["single", "ddp", "fsdp", "ps-sync", "ps-async", "ps-async-mod"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
PROTOCOL: dict[Strategy, str] = {
    "ddp": "allreduce",
    "ps-sync": "bsp",
    "ps-async": "asp",
    "ps-async-mod": "bounded_ps",
}
"""What Paceline calls them; `fsdp` is a plan (`paceline plan osdp`)."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a cluster with a batch for every worker: all that the formulas need."""

    parameters: float
    """Bytes of all parameters, P."""
    largest: float
    """Bytes of the largest layer, u."""
    activations: float
    """Bytes kept for backward of one worker's batch, A."""
    state_copies: float
    seconds: tuple[float, ...]
    """Forward and backward of one batch, for every worker."""
    batch: int
    cluster: ClusterProfile

    @property
    def workers(self) -> int:
        """N."""
        return len(self.seconds)

    @property
    def unequal(self) -> float:
        """The slowest worker's time over the fastest one's, h."""
        return max(self.seconds) / min(self.seconds)


def load_of(model: ModelProfile, cluster: ClusterProfile, batch: int) -> Load:
    """Times of a measured model are scaled by the devices' speeds; given ones are for the slowest device."""
    base = sum(op.seconds(batch) for op in model.operators)
    measured_at = model.flops_per_s or cluster.slowest_flops_per_s
    return Load(
        parameters=model.parameter_bytes,
        largest=max(op.parameter_bytes for op in model.operators),
        activations=batch * sum(op.activation_bytes for op in model.operators),
        state_copies=model.state_copies,
        seconds=tuple(base * measured_at / device.flops_per_s for device in cluster.devices),
        batch=batch,
        cluster=cluster,
    )


def memory_bytes(strategy: Strategy, load: Load, workers: int | None = None) -> float:
    """Of one worker, without what the device's context takes."""
    n, p = workers or load.workers, load.parameters
    copies = 2 + load.state_copies
    if strategy == "fsdp":
        return copies * p / n + (3 * load.largest if n > 1 else 0) + load.activations
    if strategy.startswith("ps"):
        return 3 * p + load.activations
    return (copies + (strategy == "ddp" and n > 1)) * p + load.activations


def sent_bytes(strategy: Strategy, load: Load) -> float:
    """By one worker in one step."""
    n, p = load.workers, load.parameters
    times = {"single": 0.0, "ddp": 2 * (n - 1) / n, "fsdp": 3 * (n - 1) / n}
    return times.get(strategy, 1.0) * p


def exchange_s(strategy: Strategy, load: Load) -> float:
    """Seconds of communication in one step of one worker."""
    cluster, p = load.cluster, load.parameters
    if strategy == "single" or load.workers == 1:
        return 0.0
    if strategy == "ddp":
        return cluster.line("all_reduce").seconds(p)
    if strategy == "fsdp":
        return 2 * cluster.line("all_gather").seconds(p) + cluster.line("reduce_scatter").seconds(p)
    through = load.workers if strategy == "ps-sync" else 1  # all at once through the store's link
    return 2 * cluster.link.seconds(through * p)


def samples_per_s(strategy: Strategy, load: Load) -> float:
    """Of all workers. A bound on staleness ends up at the slowest worker's pace, if it stays slow."""
    slowest, talk = max(load.seconds), exchange_s(strategy, load)
    if strategy == "single":
        return load.batch / min(load.seconds)
    if strategy == "ps-async":
        alone = sum(load.batch / (seconds + talk) for seconds in load.seconds)
        link = load.batch * load.cluster.link.bytes_per_s / load.parameters if load.workers > 1 else alone
        return min(alone, link)
    return load.workers * load.batch / (slowest + talk)
