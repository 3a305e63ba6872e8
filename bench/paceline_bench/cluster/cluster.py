"""Time to accuracy on hosts that are not alike: every protocol against DistributedDataParallel.

Hosts are those of a testbed, with links of known speed, or simulated ones. Devices are emulated, so that the
cores of this machine do not decide the result. Each entry is started anew on the same hosts, ends when a copy
of its weights has the accuracy asked for, and at the latest when its time is up.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import msgspec

from paceline.errors import ConfigError, unknown
from paceline.testbed.system import need_privileges
from paceline_bench.cluster import cifar
from paceline_bench.cluster.entries import Entry, entries, every_entry
from paceline_bench.cluster.other import NAME as DDP
from paceline_bench.cluster.results import Results
from paceline_bench.cluster.scene import QUICK, SCENES, UNEQUAL, Scene
from paceline_bench.cluster.series import Series, on_hosts
from paceline_bench.cluster.table import rows_of, told
from paceline_bench.cluster.testbed import RealHosts
from paceline_bench.cluster.virtual import VirtualHosts
from paceline_bench.experiment import carried_out
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow

QUICK_NAMES = (DDP, "bsp", "bsp+balance", "asp")


def check(plan: BenchPlan) -> None:
    """Whether there is all that it takes, before anything is measured."""
    if not plan.simulated:
        need_privileges()
    chosen(plan)
    scenes = scenes_of(plan)
    Results(_file(plan))
    if plan.quick or all(scene.task != "images" for scene in scenes):
        return
    if plan.data is None:
        raise ConfigError(
            "bench cluster trains on CIFAR-10 and has to be told where it is: --data DIR, a folder with "
            f"{cifar.TEST} and {cifar.TRAINING[0]} to {cifar.TRAINING[-1]} or some of them, from "
            f"{cifar.WHERE}."
        )
    cifar.find(Path(plan.data))


def chosen(plan: BenchPlan) -> list[Entry]:
    """The entries to run."""
    if plan.protocols:
        return entries(plan.protocols)
    return entries(QUICK_NAMES) if plan.quick else every_entry()


def scenes_of(plan: BenchPlan) -> list[Scene]:
    """The scenes to run them in."""
    if plan.quick:
        return [QUICK]
    names = _scene_names(plan)
    for name in names:
        if name not in SCENES:
            raise unknown("scene", name, SCENES)
        if SCENES[name].virtual and not plan.simulated:
            raise ConfigError(f"scene {name!r} is for virtual time only. Add --simulated.")
    return [_with_targets(SCENES[name], plan.targets) for name in names]


def _scene_names(plan: BenchPlan) -> tuple[str, ...]:
    return plan.scenes or (UNEQUAL.name,)


def record_name(name: str, plan: BenchPlan) -> str:
    """The question is how hosts are: `cluster` for the unequal ones of a testbed, `cluster-simulated-text`;
    scenes of several sizes are one question, `workers`."""
    kinds = [] if plan.quick else list(dict.fromkeys(scene.partition("-")[0] for scene in _scene_names(plan)))
    if plan.simulated:
        return "-".join([name, "simulated", *kinds])
    return name if kinds == [UNEQUAL.name] else "-".join([name, *kinds])


def _with_targets(scene: Scene, targets: tuple[float, ...]) -> Scene:
    """Other targets, where there are some to reach."""
    if not (targets and scene.targets):
        return scene
    if list(targets) != sorted(targets) or not 0 <= targets[0] <= targets[-1] <= 1:
        raise ConfigError(f"targets rise, and lie between 0 and 1, got {targets}. For instance 0.42,0.5.")
    return msgspec.structs.replace(scene, targets=targets)


def cluster(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """All runs, one after the other, then the table."""
    check(plan)
    results, seeds = Results(_file(plan)), tuple(range(plan.seed, plan.seed + plan.seeds))
    series = [
        Series(scene, chosen(plan), plan.rates, seeds, plan.simulated, version("paceline"))
        for scene in scenes_of(plan)
    ]

    def opened(each: Series[Entry], folder: Path) -> VirtualHosts | RealHosts:
        return hosts_of(each, _data(plan, folder), folder)

    def rows() -> list[BenchRow]:
        return [row for each in series for row in rows_of(each, results)]

    return carried_out(on_hosts("cluster", series, results, opened, told, rows), plan, say)


def hosts_of(series: Series[Entry], data: Path, folder: Path) -> VirtualHosts | RealHosts:
    """Simulated ones, or those of a testbed."""
    return (VirtualHosts if series.simulated else RealHosts)(series.scene, data, folder)


def _file(plan: BenchPlan) -> Path | None:
    return None if plan.results is None else Path(plan.results)


def _data(plan: BenchPlan, folder: Path) -> Path:
    """Images that are made up are a few, and always the same."""
    if not plan.quick:
        return folder if plan.data is None else Path(plan.data).resolve()
    cifar.make_up(folder, training=320, test=QUICK.tests, seed=plan.seed)
    return folder
