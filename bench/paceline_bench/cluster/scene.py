"""The small clusters of a benchmark, their work and their rules: what is the same for every entry."""

from __future__ import annotations

import hashlib

import msgspec

from paceline.sim.cluster import Stall
from paceline.sim.network import pipes
from paceline.sim.network.links import Fabric
from paceline.testbed import HostSpec, Testbed

MODEL_BYTES = 1_007_424
"""Of the CNN; the transformer has one hundredth more."""
PAYLOAD = 1448 / 1514
"""Of what a link carries, the share that is not headers of Ethernet, IP and TCP."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all entries."""

    name: str
    task: str = "images"
    links_mbit: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys("abcd", 1000.0))
    """Per host, in the order of ranks: one worker each. 0: bytes take no time (in virtual time only)."""
    slow: dict[int, float] = {}
    """Ranks whose devices take so many times longer."""
    stall: Stall | None = None
    """Hosts that stand still for a while."""
    device_s: float = 0.15
    """What a device takes for a batch; the slow one, times its factor."""
    batch: int = 64
    lr: float = 0.06
    """What suits DDP best, of 0.03, 0.06 and 0.1."""
    warmup: int = 2048
    """Samples over which the learning rate rises."""
    every: int = 2048
    """Samples between two copies of the weights."""
    tests: int = 1000
    """Test samples on which they are measured."""
    targets: tuple[float, ...] = (0.42, 0.5)
    """Accuracies to reach; at the last a run is over."""
    limit_s: float = 150.0
    """After so long it is over in any case,"""
    limit_samples: int = 100_000
    """or after so many samples, in virtual time."""
    epochs: int = 0
    """So many, with a rate that falls to 0 along a cosine, and nothing ends it sooner; 0: a steady rate."""
    virtual: bool = False
    """Whether it runs in virtual time only: it would take hours, or more hosts."""

    @property
    def slow_link(self) -> str:
        """The host whose link is slowest; the last of equals."""
        return min(reversed(self.links_mbit), key=lambda host: self.links_mbit[host])

    @property
    def workers(self) -> int:
        """One per host."""
        return len(self.links_mbit)

    @property
    def fingerprint(self) -> str:
        """Changes with anything that the course of a run depends on; targets only decide where it ends."""
        course = msgspec.structs.replace(self, targets=())
        return hashlib.sha256(msgspec.json.encode(course)).hexdigest()[:12]

    def setup(self, simulated: bool) -> str:
        """The fingerprint, and in virtual time how hosts are simulated."""
        if not simulated:
            return self.fingerprint
        models = f"{self.cluster('star')}{self.cluster('ring')}{pipes.MODEL}"
        return self.fingerprint + "-" + hashlib.sha256(models.encode()).hexdigest()[:12]

    def takes_s(self, rank: int, samples: int) -> float:
        """What a rank's device takes for so many samples."""
        return self.device_s * samples / self.batch * self.slow.get(rank, 1.0)

    def testbed(self) -> Testbed:
        """Its hosts."""
        return Testbed.up({name: HostSpec(link_mbit=mbit) for name, mbit in self.links_mbit.items()})

    def cluster(self, fabric: Fabric = "star", store_hosts: int = 1) -> str:
        """The same for the simulator: the text of a cluster file."""
        lines = [f"model_bytes = {MODEL_BYTES}", f'fabric = "{fabric}"']
        lines += [f"store_hosts = {store_hosts}"] if store_hosts > 1 else []
        lines += ["[compute]", 'kind = "fixed"', f"mean_s = {self.device_s}"]
        for mbit in self.links_mbit.values():
            lines.append("[[host]]")
            lines += [f"bandwidth_bytes_per_s = {mbit * 1e6 / 8 * PAYLOAD:.0f}"] if mbit else []
        lines += ["[slow]", *(f"{rank} = {factor}" for rank, factor in self.slow.items())]
        if self.stall is not None:
            lines += ["[stall]", f"every_s = {self.stall.every_s}", f"length_s = {self.stall.length_s}"]
        return "\n".join(lines)


UNEQUAL = Scene(name="unequal", links_mbit={"a": 1000, "b": 1000, "c": 1000, "d": 100}, slow={2: 2.0})
SCENES = {
    scene.name: scene
    for scene in (
        UNEQUAL,
        Scene(name="equal"),
        Scene(name="stalls", stall=Stall(every_s=6.0, length_s=2.0)),
        msgspec.structs.replace(
            UNEQUAL,
            name="text",
            task="text",
            batch=16,
            lr=0.003,
            every=1024,
            tests=128,
            targets=(0.4,),
            limit_samples=30_000,
        ),
        msgspec.structs.replace(
            UNEQUAL, name="decay", epochs=20, every=20_480, tests=10_000, targets=(), virtual=True
        ),
        *(
            Scene(
                name=f"workers-{workers}",
                links_mbit={f"h{rank}": 0 for rank in range(workers)},
                slow={rank: 2.0 for rank in range(workers) if rank % 4 == 2},
                targets=(0.42,),
                limit_samples=60_000,
                virtual=True,
            )
            for workers in (4, 8, 16, 32)
        ),
    )
}
QUICK = Scene(
    name="quick",
    links_mbit={"a": 1000, "b": 100},
    slow={0: 2.0},
    device_s=0.03,
    batch=8,
    lr=0.01,
    warmup=32,
    every=64,
    tests=50,
    targets=(0.0,),
    limit_s=20.0,
    limit_samples=640,
)
