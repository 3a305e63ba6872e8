"""The small cluster of a benchmark, its work and its rules: what is the same for every entry."""

from __future__ import annotations

import msgspec

from paceline.testbed import HostSpec, Testbed


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all entries."""

    links_mbit: dict[str, float]
    """Per host, in the order of ranks: one worker each."""
    slow_rank: int
    factor: float
    device_s: float
    """What a device takes for a batch; the slow one, times its factor."""
    batch: int
    lr: float
    """What suits DDP best, of 0.03, 0.06 and 0.1."""
    warmup: int
    """Samples over which the learning rate rises."""
    every: int
    """Samples between two copies of the weights."""
    images: int
    """Test images on which they are measured."""
    target: float
    limit_s: float

    @property
    def slow_link(self) -> str:
        """The host whose link is slowest; the last of equals."""
        return min(reversed(self.links_mbit), key=lambda host: self.links_mbit[host])

    @property
    def workers(self) -> int:
        """One per host."""
        return len(self.links_mbit)

    def takes_s(self, rank: int, samples: int) -> float:
        """What a rank's device takes for so many samples."""
        return self.device_s * samples / self.batch * (self.factor if rank == self.slow_rank else 1.0)

    def testbed(self) -> Testbed:
        """Its hosts."""
        return Testbed.up({name: HostSpec(link_mbit=mbit) for name, mbit in self.links_mbit.items()})


FULL = Scene(
    links_mbit={"a": 1000, "b": 1000, "c": 1000, "d": 100},
    slow_rank=2,
    factor=2.0,
    device_s=0.15,
    batch=64,
    lr=0.06,
    warmup=2048,
    every=2048,
    images=2000,
    target=0.42,
    limit_s=70.0,
)
QUICK = Scene(
    links_mbit={"a": 1000, "b": 100},
    slow_rank=0,
    factor=2.0,
    device_s=0.03,
    batch=8,
    lr=0.01,
    warmup=32,
    every=64,
    images=50,
    target=0.0,
    limit_s=20.0,
)
