"""Time to accuracy on four hosts that are not alike: every protocol against DistributedDataParallel.

Hosts are those of a testbed, with links of known speed; devices are emulated, so that the cores of
this machine do not decide the result. Each entry is started anew on the same hosts, ends when a copy
of its weights has the accuracy asked for, and at the latest when its time is up.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import msgspec

from paceline.bench.cluster import cifar
from paceline.bench.cluster.bar import Bar
from paceline.bench.cluster.course import AccuracyCourse, Figures, Judge, judge_of
from paceline.bench.cluster.ddp import NAME as DDP
from paceline.bench.cluster.entries import Entry, entries, every_entry
from paceline.bench.cluster.hosts import FIRST_PORT, StartedProcesses, bytes_over
from paceline.bench.cluster.scene import FULL, QUICK, Scene
from paceline.bench.harness.plan import BenchPlan, Say
from paceline.bench.harness.record import BenchRow, Value
from paceline.errors import ConfigError, RunError
from paceline.testbed import BedHost
from paceline.testbed.system import need_privileges

QUICK_NAMES = (DDP, "bsp", "bsp+balance", "asp")
LOOK_S = 0.1
SILENT_S = 120.0
"""How long a run may take until somebody has taken a step, and how long all may be silent later."""
TOLERATED = 0.02
"""Share of iterations that may take longer than their device; beyond, the row says so."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of an entry."""

    entry: Entry
    figures: Figures | None
    """None when nobody took a step."""
    slow_link_bytes: int
    trouble: str = ""


def check(plan: BenchPlan) -> None:
    """Whether there is all that it takes, before anything is measured."""
    need_privileges()
    chosen(plan)
    if plan.quick:
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


def cluster(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """One after the other."""
    check(plan)
    scene, todo = QUICK if plan.quick else FULL, chosen(plan)
    seen: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, scene.testbed() as bed:
        data = _data(plan, Path(folder))
        say(f"cluster: {cifar.count(cifar.find(data).training)} training images, {len(todo)} runs")
        judge = judge_of(data, scene.images)
        for number, entry in enumerate(todo):
            words = _words(scene, data, plan, entry)
            run = StartedProcesses(scene, bed, entry, words, Path(folder) / str(number), FIRST_PORT + number)
            with Bar(f"{entry.name} ({number + 1} of {len(todo)})", scene.limit_s, scene.target) as bar:
                seen.append(_follow(scene, run, bed[scene.slow_link], judge, bar))
            say(f"cluster, {entry.name}: {_told(seen[-1], scene)}")
    return [_row(outcome, seen, scene) for outcome in seen]


def _data(plan: BenchPlan, folder: Path) -> Path:
    if not plan.quick:
        assert plan.data is not None, "it was checked"
        return Path(plan.data).resolve()
    cifar.make_up(folder, training=320, test=QUICK.images, seed=plan.seed)
    return folder


def _words(scene: Scene, data: Path, plan: BenchPlan, entry: Entry) -> list[str]:
    """What the body is told, the same for all but the learning rate."""
    told = {"data": data, "batch": scene.batch, "every": scene.every, "warmup": scene.warmup}
    told |= {"lr": entry.rate(scene.lr), "seed": plan.seed}
    return [word for name, value in told.items() for word in (f"--{name}", str(value))]


def _follow(scene: Scene, run: StartedProcesses, link: BedHost, judge: Judge, bar: Bar) -> Outcome:
    """Start a run, look at it until it is there or too late, and stop it."""
    before = bytes_over(link)
    course = AccuracyCourse(scene, run.copies, judge)
    try:
        run.start()
        trouble = _watch(scene, run, course, bar)
    except RunError as error:  # one that fails does not end the others
        trouble = str(error)
    finally:
        moved = bytes_over(link) - before
        run.stop()
    figures = course.figures() if course.seconds > 0 else None
    return Outcome(run.entry, figures, moved, trouble)


def _watch(scene: Scene, run: StartedProcesses, course: AccuracyCourse, bar: Bar) -> str:
    """Until the target, the limit, or trouble, which is returned."""
    seconds, heard = 0.0, time.monotonic()
    while course.reached_s is None and course.seconds < scene.limit_s:
        trouble = run.failure()
        course.look(run.traces)
        bar.show(course.seconds, course.best)
        if trouble is not None:
            return trouble
        if course.seconds > seconds:
            seconds, heard = course.seconds, time.monotonic()
        if time.monotonic() - heard > SILENT_S:
            return f"nothing was heard of it for {SILENT_S:g} s"
        time.sleep(LOOK_S)
    return ""


def _row(outcome: Outcome, seen: list[Outcome], scene: Scene) -> BenchRow:
    entry, figures = outcome.entry, outcome.figures
    case: dict[str, Value] = {"protocol": entry.name, "settings": entry.shown, "lr": entry.rate(scene.lr)}
    case |= {f"to {100 * scene.target:g} %": _time(figures)}
    if figures is not None:
        case |= _case(figures, outcome.slow_link_bytes)
    return BenchRow(
        case=case, measured={}, figure="ratio", value=_ratio(outcome, seen), remark=_remark(outcome, scene)
    )


def _ratio(outcome: Outcome, seen: list[Outcome]) -> float | None:
    """DDP's time over this one's; None if one of them never got there."""
    ours = outcome.figures
    theirs = next(each.figures for each in seen if each.entry.protocol == DDP)
    if ours is None or theirs is None or ours.reached_s is None or theirs.reached_s is None:
        return None
    return theirs.reached_s / ours.reached_s


def _case(figures: Figures, slow_link_bytes: int) -> dict[str, Value]:
    accuracy = "" if figures.accuracy is None else f"{100 * figures.accuracy:.1f} %"
    return {
        "samples/s": round(figures.samples_per_s),
        "accuracy": accuracy,
        "MB over the slow link": round(slow_link_bytes / 1e6, 1),
        "waiting": f"{100 * figures.waiting:.0f} %",
    }


def _time(figures: Figures | None) -> str:
    if figures is None:
        return "did not run"
    return "not reached" if figures.reached_s is None else f"{figures.reached_s:.1f} s"


def _remark(outcome: Outcome, scene: Scene) -> str:
    """Whatever has to be known beside the figures."""
    figures, said = outcome.figures, [outcome.trouble] if outcome.trouble else []
    if figures is None:
        return said[0] if said else "nobody took a step"
    if figures.reached_s is None and figures.best is not None:
        said.append(f"best accuracy {100 * figures.best:.1f} % in {figures.seconds:.0f} s")
    if len(figures.ranks) < scene.workers:
        said.append(f"only ranks {sorted(figures.ranks)} took part")
    if figures.late > TOLERATED:
        said.append(f"{100 * figures.late:.0f} % of iterations took longer than their device")
    return "; ".join([*said, *figures.lost])


def _told(outcome: Outcome, scene: Scene) -> str:
    figures, remark = outcome.figures, _remark(outcome, scene)
    if figures is None:
        return f"did not run: {remark}"
    told = f"{_time(figures)}, {figures.samples_per_s:.0f} samples/s, {100 * figures.waiting:.0f} % waiting"
    return f"{told}; {remark}" if remark else told
