"""A cluster as a command asks for it: a file or a recorded run, with flags on top."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.errors import ConfigError
from paceline.sim.cluster import Cluster
from paceline.sim.toml import load_cluster

FLAGS_ONLY = ("compute_s", "jitter", "latency_s", "bandwidth_bytes_per_s", "apply_s", "model_bytes", "batch")


class ClusterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Plain data, so that it can be saved with a run and sent to another process."""

    file: str | None = None
    run: str | None = None
    """A run whose compute times are to be drawn from."""
    workers: int | None = None
    slow: dict[int, float] = {}
    compute_s: float = 0.1
    jitter: float = 0.0
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float | None = None
    apply_s: float = 0.0
    model_bytes: int | None = None
    batch: int = 1

    def cluster(self) -> Cluster:
        """The cluster that was asked for."""
        if self.file is not None and self.run is not None:
            raise ConfigError("a cluster comes from a file or from a recorded run, not from both. Give one.")
        if self.file is None and self.run is None:
            return self._from_flags()
        base = load_cluster(self.file) if self.file is not None else Cluster.from_run(Path(str(self.run)))
        ignored = [name for name in FLAGS_ONLY if getattr(self, name) != getattr(ClusterRequest(), name)]
        if ignored:
            raise ConfigError(
                f"{', '.join(ignored)} cannot be combined with a cluster file or run. Write it there."
            )
        return base.with_workers(base.workers if self.workers is None else self.workers).with_slow(self.slow)

    def _from_flags(self) -> Cluster:
        return Cluster.from_flags(
            workers=4 if self.workers is None else self.workers,
            compute_s=self.compute_s,
            jitter=self.jitter,
            slow=self.slow,
            latency_s=self.latency_s,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            apply_s=self.apply_s,
            model_bytes=self.model_bytes,
            batch=self.batch,
        )
