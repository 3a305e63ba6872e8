"""Simulated against measured samples/s: what is compared, how it is judged, what is refused."""

from __future__ import annotations

from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from paceline.errors import ConfigError
from paceline.protocols import PACED, PEERS
from paceline.protocols.peer.osp import OSP
from paceline.protocols.settings import make_any
from paceline.sim import load_cluster, simulate_peers
from paceline.testbed import why_not
from paceline.trace import TraceWriter
from paceline.trace.events import SCHEMA, Decided, RunStarted
from paceline_bench.cluster.course import AccuracyCourse, Figures
from paceline_bench.cluster.entries import parse_entry
from paceline_bench.cluster.results import Outcome, Results
from paceline_bench.cluster.scene import SCENES, Scene
from paceline_bench.cluster.series import Series
from paceline_bench.cluster.tasks import TASKS
from paceline_bench.fidelity.beds import BEDS, QUICK_BED
from paceline_bench.fidelity.fidelity import check, chosen, fidelity
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.harness.record import BenchRecord, as_tables
from support.command import run_command

STARTED = RunStarted(0.0, SCHEMA, "a run", "asp", {}, 2, 0, simulated=False, started_at="")
needs_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@needs_hosts
@pytest.mark.long  # three runs on real hosts
@pytest.mark.timeout(300)
def test_both_sides_run_and_are_compared_by_the_command(tmp_path: Path) -> None:
    done = run_command("bench", "fidelity", "--quick", "--json", cwd=tmp_path, timeout_s=280.0)
    assert done.returncode == 0, done.stderr
    [record] = msgspec.json.decode(done.stdout, type=list[BenchRecord])
    assert [row.case["protocol"] for row in record.rows] == ["ddp", "bsp", "allreduce"]
    assert all(row.value is not None for row in record.rows)


def outcomes(folder: Path, name: str, simulated: float, measured: float) -> Path:
    """A file in which both runs of an entry, and of DDP, on the quick testbed are known."""
    path = folder / "kept.jsonl"
    results = Results(path)
    for entry in (parse_entry("ddp"), parse_entry(name)):
        for virtual, pace in ((True, simulated), (False, measured)):
            series = Series(QUICK_BED, [entry], (), (0,), virtual, version("paceline"))
            figures = Figures(1.0, pace, 0.0, None, None, (), 0.0, frozenset(range(2)), steady_per_s=pace)
            results.add(Outcome(job=series.jobs(entry, 0, results)[0], figures=figures))
    return path


@pytest.mark.parametrize(
    ("simulated", "within"), [(109.0, True), (111.0, False), (91.0, True), (89.0, False)]
)
def test_ten_percent_either_way_is_near_and_known_runs_are_not_made_again(
    simulated: float, within: bool, tmp_path: Path
) -> None:
    path = outcomes(tmp_path, "osp", simulated, 100.0)
    plan = BenchPlan(quick=True, protocols=("osp",), results=str(path))
    rows = fidelity(plan, lambda text: None)
    assert [row.case["protocol"] for row in rows] == ["ddp", "osp"]
    assert [row.met for row in rows] == [within, within]
    assert rows[1].case["ratio"] == f"{simulated / 100:.2f}"
    assert ("| yes |" if within else "| no |") in as_tables(rows)[-1]


def test_every_protocol_is_compared_on_three_testbeds() -> None:
    names = {entry.protocol for entry in chosen(BenchPlan())}
    assert names == {"ddp", *PACED, *PEERS}
    assert list(BEDS) == ["unequal", "equal", "slow_first"]


def test_a_pace_does_not_depend_on_where_in_a_round_the_time_was_up(tmp_path: Path) -> None:
    """Two workers, one push a second each, half a second apart, after a long first one."""
    bed = msgspec.structs.replace(QUICK_BED, limit_s=100.0)
    for last in (10, 11):
        path = tmp_path / f"{last}.jsonl"
        with closing(TraceWriter(path)) as writer:
            writer.write(STARTED)
            for number in range(last):
                for rank in range(2):
                    t = 7.0 + number + rank / 2
                    writer.write(Decided(t, 2 * number + rank, rank, 0, samples=8, compute_s=5.0))
        course = AccuracyCourse(bed, tmp_path, lambda copy: 0.0)
        course.look([path])
        assert course.figures().steady_per_s == pytest.approx(16.0)


def test_what_comes_after_the_limit_does_not_count_towards_a_pace(tmp_path: Path) -> None:
    bed = msgspec.structs.replace(QUICK_BED, limit_s=10.0)
    path = tmp_path / "trace.jsonl"
    with closing(TraceWriter(path)) as writer:
        writer.write(STARTED)
        for t in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 50.0):
            writer.write(Decided(t, 1, 0, 0, samples=8, compute_s=1.0))
    course = AccuracyCourse(bed, tmp_path, lambda copy: 0.0)
    course.look([path])
    assert course.figures().steady_per_s == pytest.approx(8.0)


def simulated_pace(scene: Scene, name: str, tmp_path: Path) -> float:
    path = tmp_path / "cluster.toml"
    path.write_text(scene.cluster())
    entry = parse_entry(name)
    protocol = make_any(entry.protocol, entry.settings)
    return simulate_peers(protocol, load_cluster(path), iterations=40).result().samples_per_s  # type: ignore[arg-type]


def test_osp_is_predicted_to_gain_little_where_the_testbed_measured_no_gain(tmp_path: Path) -> None:
    """The record of the testbed has 708 samples/s for both; links of one's own made it 1.24 times as fast."""
    osp, allreduce = (simulated_pace(SCENES["unequal"], name, tmp_path) for name in ("osp", "allreduce"))
    assert osp / allreduce == pytest.approx(1.0, abs=0.1)


def test_results_of_a_simulation_are_known_by_how_hosts_are_simulated_too() -> None:
    scene = SCENES["unequal"]
    assert scene.setup(simulated=False) == scene.fingerprint
    assert scene.setup(simulated=True) not in (scene.fingerprint, SCENES["equal"].setup(simulated=True))


@needs_hosts
def test_an_unknown_testbed_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'slow_first'"):
        check(BenchPlan(scenes=("slow_frist",)))


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="which only root may"):
        check(BenchPlan(quick=True))


def test_osp_has_something_to_put_off_on_the_testbeds() -> None:
    sizes = tuple(4 * each.numel() for each in TASKS[BEDS["unequal"].task].model(0).parameters())
    osp = make_any("osp", parse_entry("osp").settings)
    assert isinstance(osp, OSP)
    agreed = SimpleNamespace(room=1.0, scores={}, later=None, now=None)
    me = SimpleNamespace(count=osp.rank_every - 1, tensors=SimpleNamespace(sizes=sizes), agreed=agreed)
    assert list(osp.rank(me)) == []  # type: ignore[arg-type]
    assert agreed.later.size_bytes > 0
    assert sum(sizes) == 1_004_000  # as before there were several tensors: records stay comparable
