"""What a user would run instead of Paceline, on the same hosts, model, data, seeds and straggler."""

from __future__ import annotations

import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

from paceline.errors import ConfigError
from paceline.testbed.system import need_privileges
from paceline_bench.cluster import cifar
from paceline_bench.cluster.results import Results
from paceline_bench.cluster.scene import Scene
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.rivals import digits
from paceline_bench.rivals.hosts import PeerHosts
from paceline_bench.rivals.roster import QUICK_NAMES, Found, Rival, Side, check_folder, find, sides
from paceline_bench.rivals.scene import scenes
from paceline_bench.rivals.series import Contest, run_all
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
    results, contest = Results(_path(plan.results)), _contest(plan, say)
    if plan.results is not None:
        say(f"peers: {len(results)} runs are in {plan.results} already; what is missing is added to it")
    try:
        _run(plan, contest, results, say)
    except KeyboardInterrupt:
        if plan.results is not None:
            say(f"peers: {len(results)} runs are in {plan.results}: the same command goes on from there")
        raise
    return rows_of(contest, results)


def _contest(plan: BenchPlan, say: Say) -> Contest:
    trained, killed = scenes(plan.quick, plan.data is not None, plan.targets)
    chosen, seeds = _sides(plan), tuple(range(plan.seed, plan.seed + plan.seeds))
    return Contest(trained, killed, chosen, _found(plan, chosen, say), plan.rates, seeds, version("paceline"))


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


def _run(plan: BenchPlan, contest: Contest, results: Results, say: Say) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True) as folder:
        digits.write(Path(folder))
        run_all(contest, partial(_opened, plan, Path(folder)), results, say, told)


def _opened(plan: BenchPlan, folder: Path, scene: Scene) -> PeerHosts:
    images = scene.task == "images" and plan.data is not None
    data = Path(plan.data).resolve() if images and plan.data is not None else folder
    return PeerHosts(scene, data, Path(tempfile.mkdtemp(dir=folder)))


def _sides(plan: BenchPlan) -> list[Side]:
    return sides(plan.protocols or (QUICK_NAMES if plan.quick else ()))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).resolve()
