"""Who is compared: what a user would run instead of Paceline, and a few of ours.

Every rival runs the same body. One that needs more than torch has an interpreter of its own, in a folder that
`scripts/rivals` fills: DIR/NAME/bin/python, and DIR/NAME.txt with the reason where installing it failed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.errors import ConfigError
from paceline_bench.cluster.entries import STALE_SHARE, Entry, parse_entry
from paceline_bench.cluster.scene import Scene

WORKERS = "paceline_bench.rivals.workers"
ASKED_S = 300.0
"""How long an interpreter may take to import a rival."""


class Rival(msgspec.Struct, frozen=True):
    """A way to train that is not ours."""

    name: str
    settings: str
    """What it was set to, in its own words, and what happens when a worker dies."""
    module: str = ""
    """Below `workers/`; none: nothing that installs has ever been seen."""
    package: str = ""
    """What has to be installed for it; none: torch is enough."""
    imported: str = ""
    """Under which name, where it is another one."""
    server: bool = False
    """Whether a process of its own on the first host serves all workers."""
    node: bool = False
    """Whether a process of its own has to run on every host."""
    restarts: bool = False
    """Whether torchrun starts all workers anew when one has died; they go on from a snapshot."""
    stale: bool = False
    """Whether it steps along stale gradients, which nothing corrects."""

    @property
    def title(self) -> str:
        """As in the table."""
        return self.name

    def rates(self, given: tuple[float, ...], scene: Scene) -> tuple[float, ...]:
        """Those that are given, or the usual one. Along stale gradients that is half, as for ours; and ours
        counts a push 1/N, so that a server of whole steps gets a rate as much lower."""
        return given or (scene.lr * STALE_SHARE / scene.workers if self.stale else scene.lr,)


ELASTIC = "killed: torchrun --max-restarts 3, snapshot after every epoch"
RIVALS = {
    rival.name: rival
    for rival in (
        Rival("ddp", f"gradient_as_bucket_view; {ELASTIC}", "ddp", restarts=True),
        Rival(
            "post_local_sgd",
            f"PostLocalSGDOptimizer, DDP for 8 steps, then an average every 4; {ELASTIC}",
            "post_local_sgd",
            restarts=True,
        ),
        Rival("fsdp2", f"fully_shard, one group; {ELASTIC}", "fsdp2", restarts=True),
        Rival(
            "rpc",
            "torch.distributed.rpc, asynchronous parameter server, one flat tensor",
            "rpc",
            server=True,
            stale=True,
        ),
        Rival(
            "ray",
            "asynchronous parameter server in an actor, one flat array",
            "ray_server",
            "ray",
            server=True,
            node=True,
            stale=True,
        ),
        Rival(
            "torchft", "LocalSGD, sync_every 4, quorum of the living", "torchft_local", "torchft", server=True
        ),
        Rival(
            "torchft_diloco",
            "DiLoCo, sync_every 8, outer SGD 0.7 with Nesterov momentum 0.9",
            "torchft_local",
            "torchft",
            server=True,
        ),
        Rival(
            "hivemind",
            "Optimizer, local updates, target_batch_size 8 rounds, matchmaking 3 s",
            "hivemind_peers",
            "hivemind",
            server=True,
        ),
        Rival("deepspeed", f"ZeRO stage 1 on gloo; {ELASTIC}", "zero", "deepspeed", restarts=True),
        Rival("horovod", "DistributedOptimizer over gloo", "", "horovod", "horovod.torch.mpi_lib_v2"),
        Rival("byteps", "DistributedOptimizer", "", "byteps"),
    )
}
OURS = ("bsp", "asp", "dssp:preset=figure2", "local_sgd", "allreduce")
QUICK_NAMES = ("ddp", "rpc", "bsp")
Side = Rival | Entry


def sides(names: Sequence[str]) -> list[Side]:
    """Those that were named, ours by the names of protocols; without a name all."""
    chosen = [name.strip() for name in names] or [*RIVALS, *OURS]
    return [RIVALS[name] if name in RIVALS else parse_entry(name) for name in chosen]


class Found(msgspec.Struct, frozen=True):
    """Where a rival's interpreter is, or why there is none."""

    python: str = sys.executable
    version: str = ""
    reason: str = ""


def find(rival: Rival, folder: Path | None) -> Found:
    """Ask its interpreter whether it is there."""
    if not rival.package:
        return Found()
    python = Path(sys.executable) if folder is None else folder / rival.package / "bin" / "python"
    if not python.exists():
        python = Path(sys.executable)
    asked = _ask(str(python), rival.package, rival.imported or rival.package)
    if asked.reason:
        return Found(reason=_why(rival, folder) or asked.reason)
    if not rival.module:
        return Found(
            reason=f"{rival.package} {asked.version} is installed, but nobody has written its worker"
        )
    return asked


def check_folder(folder: Path | None) -> None:
    """A folder that is named has to be there."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} with rivals. Make it: scripts/rivals {folder}.")


def _ask(python: str, package: str, imported: str) -> Found:
    text = f"import importlib.metadata as m, {imported}; print(m.version({package!r}))"
    command = [python, "-W", "ignore", "-c", text]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASKED_S, check=False)
    except subprocess.TimeoutExpired:
        return Found(reason=f"was not imported within {ASKED_S:g} s")
    if done.returncode == 0:
        return Found(python, done.stdout.strip().splitlines()[-1])
    said = done.stderr.strip().splitlines()
    return Found(reason=f"cannot be imported: {said[-1] if said else done.returncode}")


def _why(rival: Rival, folder: Path | None) -> str:
    if folder is None:
        return f"needs {rival.package}: make an interpreter for it (scripts/rivals DIR), and say --rivals DIR"
    note = folder / f"{rival.package}.txt"
    return note.read_text().strip() if note.exists() else ""
