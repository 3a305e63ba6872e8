"""What a user would run instead of Paceline, on the same hosts, model, data, seeds and straggler."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from paceline.errors import ConfigError
from paceline.testbed.system import need_privileges
from paceline_bench.cluster import cifar
from paceline_bench.cluster.results import Results
from paceline_bench.cluster.scene import Scene
from paceline_bench.cluster.series import Series, on_hosts
from paceline_bench.experiment import carried_out
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.rivals import digits
from paceline_bench.rivals.hosts import PeerHosts
from paceline_bench.rivals.roster import QUICK_NAMES, Found, Rival, Side, check_folder, find, sides
from paceline_bench.rivals.scene import scenes
from paceline_bench.rivals.series import contest
from paceline_bench.rivals.table import rows_of, told


def check_peers(plan: BenchPlan) -> None:
    """Whether there is all that it takes, before anything is measured."""
    need_privileges()
    _sides(plan)
    check_folder(_path(plan.rivals))
    Results(_path(plan.results))
    if list(plan.targets) != sorted(plan.targets) or any(target > 1 for target in plan.targets):
        raise ConfigError(f"targets rise, and are at most 1, got {plan.targets}. For instance 0.9,0.95.")
    if plan.data is not None:
        cifar.find(Path(plan.data))


def peers(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """All runs, one after the other, then the table."""
    check_peers(plan)
    results, chosen = Results(_path(plan.results)), _sides(plan)
    seeds = tuple(range(plan.seed, plan.seed + plan.seeds))
    where = scenes(plan.quick, plan.data is not None, plan.targets)
    both = contest(where, chosen, plan.rates, seeds, version("paceline"))
    found = _found(plan, chosen, say)

    def opened(series: Series[Side], folder: Path) -> PeerHosts:
        return PeerHosts(series.scene, _data(plan, series.scene, folder), folder, found)

    experiment = on_hosts("peers", both, results, opened, told, lambda: rows_of(both, results))
    return carried_out(experiment, plan, say)


def _found(plan: BenchPlan, chosen: list[Side], say: Say) -> dict[str, Found]:
    """Where every rival is."""
    found = {}
    for side in chosen:
        if isinstance(side, Rival):
            answer = found[side.title] = find(side, _path(plan.rivals))
            if answer.reason:
                say(f"peers: {side.title} is left out: {answer.reason}")
            elif answer.version:
                say(f"peers: {side.title} is there, {side.package} {answer.version}")
    return found


def _data(plan: BenchPlan, scene: Scene, folder: Path) -> Path:
    """Images where they are; the digits are written."""
    if scene.task == "images" and plan.data is not None:
        return Path(plan.data).resolve()
    digits.write(folder)
    return folder


def _sides(plan: BenchPlan) -> list[Side]:
    return sides(plan.protocols or (QUICK_NAMES if plan.quick else ()))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).resolve()
