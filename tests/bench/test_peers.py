"""Rivals on the same hosts: who takes part, what is counted when a worker is killed, what the table says."""

from __future__ import annotations

import subprocess
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.testbed import why_not
from paceline_bench.cluster.course import Figures, Reached
from paceline_bench.cluster.entries import Entry
from paceline_bench.cluster.other import OtherPace, trace_of
from paceline_bench.cluster.results import Outcome, Results
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.harness.record import BenchRecord
from paceline_bench.harness.run import BENCHMARKS, chosen
from paceline_bench.rivals import digits, roster
from paceline_bench.rivals.killed import Killed, TracedStep, applied, steps_of, stood_still_s
from paceline_bench.rivals.peers import check_peers
from paceline_bench.rivals.plot import plots_of_peers
from paceline_bench.rivals.roster import OURS, RIVALS, Found, Rival, find, sides
from paceline_bench.rivals.scene import DIGITS, KILL, VICTIM, scenes
from paceline_bench.rivals.series import Contest
from paceline_bench.rivals.series import contest as contest_of
from paceline_bench.rivals.table import rows_of, times_text
from support.command import run_command

needs_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
FIGURES = Figures(
    seconds=20.0,
    samples_per_s=100.0,
    waiting=0.25,
    accuracy=0.95,
    best=0.95,
    reached=(Reached(0.93, 20.0, 2000),),
    late=0.0,
    ranks=frozenset(range(4)),
)
KILLED = Killed(
    finished=True,
    went_on=True,
    still_s=2.0,
    ended=True,
    statuses={"a": 0, "b": -9},
    planned=4000,
    applied=3900,
    computed=4200,
)


def contest(*names: str, rates: tuple[float, ...] = (), seeds: tuple[int, ...] = (0,)) -> Contest:
    return contest_of((DIGITS, KILL), sides(names), rates, seeds, "1")


def played(what: Contest, seconds: dict[tuple[str, float, int], float]) -> Results:
    """Everybody in the dictionary has reached the target; nobody else has run."""
    results = Results(None)
    for side in what.trained.sides:
        for (title, lr, seed), taken in seconds.items():
            if title == side.title:
                figures = msgspec.structs.replace(FIGURES, reached=(Reached(0.93, taken, 2000),))
                job = what.trained.job(side, lr, seed)
                results.add(Outcome(job=job, figures=figures, slow_link_bytes=4_000_000))
    return results


@needs_hosts
@pytest.mark.timeout(600)
def test_rivals_and_ours_train_with_all_workers_and_lose_one(tmp_path: Path) -> None:
    """By the command of the documentation."""
    done = run_command("bench", "peers", "--quick", "--json", cwd=tmp_path, timeout_s=580.0)
    assert done.returncode == 0, done.stderr
    [record] = msgspec.json.decode(done.stdout, type=list[BenchRecord])
    rows = {str(row.case["side"]): row for row in record.rows}
    assert list(rows) == ["ddp", "rpc", "bsp"]
    for row in rows.values():
        assert row.value is not None, row.remark
        assert float(str(row.case["slow link, MB"])) > 1
    for name in ("ddp", "bsp"):  # which do not get there without everybody
        assert "took part" not in rows[name].remark
    assert rows["bsp"].case["killed: job finishes"] == "yes"
    assert rows["bsp"].case["samples lost"] == "0.0 %"
    assert rows["rpc"].case["killed: job finishes"] == "yes"  # its server does not leave with the dead
    assert record.load_after is not None


def test_every_rival_and_some_of_ours_take_part_unless_named() -> None:
    assert [side.title for side in sides(())] == [*RIVALS, *OURS]
    rival, ours = sides(("rpc", "ssp:staleness=5"))
    assert isinstance(rival, Rival)
    assert isinstance(ours, Entry)
    with pytest.raises(ConfigError, match="Did you mean"):
        sides(("bspp",))


def test_everybody_tries_the_same_number_of_learning_rates() -> None:
    assert {len(contest().trained.tried(side)) for side in sides(())} == {1}
    three = contest(rates=(0.1, 0.2, 0.3))
    assert {tuple(job.lr for job in three.trained.tried(side)) for side in sides(())} == {(0.1, 0.2, 0.3)}


def test_stale_gradients_that_nothing_corrects_get_half_the_rate_and_whole_steps_a_quarter_of_it() -> None:
    what = contest()
    rates = {side.title: what.trained.tried(side)[0].lr / DIGITS.lr for side in what.trained.sides}
    assert {title for title, rate in rates.items() if rate == 0.5 / DIGITS.workers} == {"rpc", "ray"}
    assert set(rates.values()) == {0.5 / DIGITS.workers, 1.0}


def test_the_best_rate_of_the_first_seed_is_used_by_the_others_and_when_a_worker_is_killed() -> None:
    what = contest("ddp", "asp", rates=(0.1, 0.2), seeds=(0, 1))
    results = played(what, {("ddp", 0.1, 0): 9.0, ("ddp", 0.2, 0): 8.0, ("asp", 0.1, 0): 3.0})
    ddp, asp = what.trained.sides
    assert [job.lr for job in what.trained.jobs(ddp, 1, results)] == [0.2]
    assert [job.lr for job in what.trained.jobs(asp, 1, results)] == [0.1]
    assert [job.lr for job in what.killed.jobs(ddp, 0, results)] == [0.2]


def test_who_never_gets_there_counts_as_infinitely_late() -> None:
    assert times_text([9.0, 8.0, 10.0]) == "9.0 s (8.0-10.0)"
    assert times_text([9.0, 8.0, inf]) == "9.0 s (8.0-never: 1 of 3)"
    assert times_text([inf, 8.0, inf]) == "not reached, 1 of 3 from 8.0 s on"
    assert times_text([inf, inf]) == "not reached"


def test_samples_of_a_job_that_was_cut_off_are_not_called_lost_without_saying_so() -> None:
    what = contest("hivemind")
    [side] = what.trained.sides
    for ended, text in ((True, "50.0 %"), (False, "50.0 % (cut off)")):
        results, killed = Results(None), msgspec.structs.replace(KILLED, applied=2000, ended=ended)
        [job] = what.killed.jobs(side, 0, results)
        results.add(Outcome(job=job, figures=FIGURES, killed=killed))
        [row] = rows_of(what, results)
        assert row.case["samples lost"] == text


def test_a_row_says_if_its_rate_is_the_lowest_or_highest_that_was_tried() -> None:
    what = contest("ddp", "asp", "bsp", rates=(0.1, 0.2, 0.3))
    best = {"ddp": 0.1, "asp": 0.2, "bsp": 0.3}
    times = {(name, lr, 0): 8.0 if lr == best[name] else 9.0 for name in best for lr in what.trained.rates}
    said = {row.case["side"]: row.remark for row in rows_of(what, played(what, times))}
    assert said["ddp"] == "its best rate is the lowest of those tried"
    assert said["bsp"] == "its best rate is the highest of those tried"
    assert "rate" not in said["asp"]


def test_one_that_did_not_run_is_a_row_with_the_reason() -> None:
    what = contest("ddp", "horovod")
    results = played(what, {("ddp", DIGITS.lr, 0): 9.0})
    _, horovod = what.trained.sides
    for series in what:
        [job] = series.jobs(horovod, 0, results)
        results.add(Outcome(job=job, figures=None, trouble="cmake failed"))
    rows = rows_of(what, results)
    assert (rows[0].value, rows[1].value) == (1.0, None)
    assert (rows[1].case["time"], rows[1].remark) == ("did not run", "cmake failed")
    assert rows[1].case["killed: job finishes"] == "did not run"


def test_the_table_has_medians_ranges_and_what_a_death_costs() -> None:
    what = contest("ddp", "bsp", seeds=(0, 1, 2))
    times = {("ddp", DIGITS.lr, n): 10.0 + n for n in range(3)} | {
        ("bsp", DIGITS.lr, n): 5.0 for n in range(3)
    }
    results = played(what, times)
    for seed in what.trained.seeds:
        [job] = what.killed.jobs(what.trained.sides[1], seed, results)
        results.add(Outcome(job=job, figures=FIGURES, killed=KILLED))
    ddp, bsp = rows_of(what, results)
    assert ddp.case["time"] == "11.0 s (10.0-12.0)"
    assert (bsp.value, bsp.case["seeds"]) == (2.2, 3)
    assert bsp.case["slow link, kB a sample"] == "2.0 (2.0-2.0)"
    assert bsp.case["stood still or until the end"] == "2.0 s (2.0-2.0)"
    assert (bsp.case["samples lost"], bsp.case["computed in vain"]) == ("2.5 % (2.5-2.5)", "7.5 % (7.5-7.5)")


def test_the_plot_has_every_side_and_no_bar_for_a_job_that_did_not_finish() -> None:
    what = contest("ddp", "bsp")
    results = played(what, {("ddp", DIGITS.lr, 0): 9.0, ("bsp", DIGITS.lr, 0): 5.0})
    for side, finished in zip(what.trained.sides, (False, True), strict=True):
        [job] = what.killed.jobs(side, 0, results)
        killed = msgspec.structs.replace(KILLED, finished=finished)
        results.add(Outcome(job=job, figures=FIGURES, killed=killed))
    drawn = plots_of_peers(rows_of(what, results))["bars"]
    assert drawn.startswith("<svg")
    assert drawn.count("<rect") == 1 + 2 * 5 - 1
    assert "did not finish" in drawn


def step(t: float, rank: int, clock: int = 0) -> TracedStep:
    return TracedStep(t, rank, clock, 16, True)


def test_a_worker_stands_still_for_its_longest_gap_after_the_death_less_the_usual_one() -> None:
    before = [step(float(t), rank) for t in range(5) for rank in (0, VICTIM)]
    after = [step(t, 0) for t in (5.0, 15.0, 16.0, 17.0)]
    assert stood_still_s([[*before, *after]], VICTIM) == pytest.approx(9.0)


def test_a_worker_that_was_started_again_does_not_hide_how_long_the_others_stood_still() -> None:
    first = [step(float(t), rank) for t in range(5) for rank in (0, VICTIM)]
    second = [step(float(t), rank) for t in range(14, 20) for rank in (0, VICTIM)]
    assert stood_still_s([first, second], VICTIM) == pytest.approx(9.0)


def test_nobody_has_gone_on_by_finishing_what_was_under_way() -> None:
    before = [step(float(t), rank) for t in range(5) for rank in (0, 2, VICTIM)]
    under_way = [step(t, rank) for t in (4.5, 5.0) for rank in (0, 2)]
    assert stood_still_s([[*before, *under_way]], VICTIM) is None


def test_after_a_restart_only_what_the_snapshot_and_the_second_attempt_have_is_in_the_weights() -> None:
    first = [step(0.1 * clock, rank, clock) for clock in range(1, 8) for rank in range(2)]
    second = [step(5 + 0.1 * clock, rank, clock) for clock in range(5, 11) for rank in range(2)]
    assert applied([first, second], 16) == 2 * 10 * 16
    assert applied([first, []], 16) == 2 * 7 * 16
    assert applied([[], []], 16) == 0


def test_a_trace_that_is_not_there_has_no_steps(tmp_path: Path) -> None:
    assert steps_of(tmp_path / "rank0.jsonl") == []


def test_a_rival_without_an_interpreter_says_what_to_do_or_why_installing_it_failed(tmp_path: Path) -> None:
    rival = Rival("nobody", "", "ddp", "no_such_package_at_all")
    assert "scripts/rivals DIR" in find(rival, None).reason
    (tmp_path / "no_such_package_at_all.txt").write_text("its build wants CUDA\n")
    assert find(rival, tmp_path).reason == "its build wants CUDA"
    (tmp_path / "no_such_package_at_all.txt").unlink()
    assert "cannot be imported" in find(rival, tmp_path).reason
    assert find(RIVALS["ddp"], None) == Found()


def test_an_interpreter_that_hangs_is_a_reason_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(roster, "ASKED_S", 0.01)
    assert "within" in find(Rival("slow", "", "ddp", "torch"), tmp_path).reason


@needs_hosts
def test_a_folder_that_is_not_there_and_targets_that_fall_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scripts/rivals"):
        check_peers(BenchPlan(rivals=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="targets rise"):
        check_peers(BenchPlan(targets=(0.9, 0.5)))


def test_it_has_to_be_named() -> None:
    assert "peers" in BENCHMARKS
    assert "peers" not in chosen([], BenchPlan())


def test_digits_are_split_the_same_way_for_everybody_and_the_model_fits_into_one_bucket(
    tmp_path: Path,
) -> None:
    digits.write(tmp_path)
    training = digits.training_set(tmp_path)
    shown = digits.measure(tmp_path, 360)(digits.network(0))
    assert len(training) == 1408
    assert 0.0 <= shown <= 0.4
    size = sum(4 * value.numel() for value in digits.network(0).parameters())
    assert 1_000_000 < size < 1 << 20


def test_images_are_trained_on_where_they_are_and_deaths_are_those_of_digits() -> None:
    assert [scene.task for scene in scenes(False, True, ())] == ["images", "digits"]
    assert scenes(False, False, (0.5, 0.9))[0].targets == (0.5, 0.9)


def test_one_that_goes_round_the_slow_link_is_found_out() -> None:
    what = contest("ddp")
    results = played(what, {("ddp", DIGITS.lr, 0): 9.0})
    [job] = what.trained.tried(what.trained.sides[0])
    assert "way round" not in rows_of(what, results)[0].remark
    results.add(Outcome(job=job, figures=FIGURES, slow_link_bytes=1000))
    assert "way round" in rows_of(what, results)[0].remark


def test_the_script_that_installs_rivals_wants_a_folder() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "rivals"
    done = subprocess.run([script], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (2, "usage: scripts/rivals DIR [NAME ...]\n")


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "  In file included from /tmp/x/all.h:1\n      /tmp/x/all.h:5:2: error: #error C++17 wanted\n"
            "      /tmp/x/other.cc:9:1: error: later\n  ERROR: Could not build wheels for made\n",
            "ERROR: Could not build wheels for made (all.h:5:2: error: #error C++17 wanted)",
        ),
        (
            "  error: subprocess-exited-with-error\nERROR: No matching distribution | made\n",
            "ERROR: No matching distribution / made",
        ),
    ],
)
def test_a_rival_that_does_not_install_tells_the_compilers_first_error(
    tmp_path: Path, log: str, reason: str
) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "rivals"
    (tmp_path / "made.log").write_text(log)
    told = f"eval \"$(sed -n '/^reason()/,/^}}/p' {script})\"; reason made"
    done = subprocess.run(["bash", "-c", told], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == reason


class LonePace(OtherPace):
    """A world of one, that steps as the body does."""

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], scheduler: Any) -> Any:
        self.module, self.optimizer, self.scheduler = model, optimizer, scheduler
        return model, optimizer, self.deal(loader), scheduler


def trained(folder: Path, data: TensorDataset, epochs: int) -> nn.Module:
    """So many epochs, the first ones taken from a snapshot where there is one."""
    folder.mkdir(exist_ok=True)
    pace = LonePace("lone", RunConfig(run="lone", folder=str(folder), workers=1), folder / "s", 0, 1)
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda done: 1.0 / (1 + done))
    *_, loader, _ = pace.prepare(model, optimizer, DataLoader(data, batch_size=64), scheduler)
    for _ in pace.epochs(epochs):
        for batch in loader:
            pace.backward(digits.loss(model, batch))
            pace.computed()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    pace.close()
    return model


def test_a_rival_that_is_started_again_goes_on_from_its_snapshot_bit_for_bit(tmp_path: Path) -> None:
    digits.write(tmp_path)
    data = digits.training_set(tmp_path)
    whole = trained(tmp_path / "whole", data, 2)
    trained(tmp_path / "twice", data, 1)
    again = trained(tmp_path / "twice", data, 2)
    assert all(map(torch.equal, whole.state_dict().values(), again.state_dict().values()))
    attempts = [steps_of(trace_of(tmp_path / "twice", 0, attempt)) for attempt in range(2)]
    assert applied(attempts, 64) == 2 * len(data)
