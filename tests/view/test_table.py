"""The comparison says what the results say, and admits what it does not know."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from paceline.trace import Result, tally
from paceline.trace.landscape import LandscapeSummary
from paceline.trace.tally import Failure, Moment
from paceline.view.compare import compare, labels, speedups
from paceline.view.figures import DASH
from paceline.view.terminal.table import comparison, print_comparison, summary
from view.synthetic import SyntheticRun


def result(protocol: str = "bsp", **changes: Any) -> Result:
    nothing: dict[str, Any] = dict.fromkeys(Result.__struct_fields__)
    known = {
        "run": "r",
        "settings": {},
        "workers": 4,
        "simulated": False,
        "seed": 0,
        "status": "finished",
        "seconds": 10.0,
        "samples": 0,
        "updates": 0,
        "waiting_share": [None] * 4,
        "failures": [],
        "compress": "none",
        "correct": "none",
    }
    return Result(**{**nothing, **known, "protocol": protocol, **changes})


def text(view: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as shown:
        console.print(view)
    return shown.get()


def test_unknown_figures_are_dashes_and_never_zeros() -> None:
    row = compare([result()]).rows[0]
    assert set(row[1:]) == {"—"}
    assert "0" not in "".join(row)


def test_speedup_is_the_ratio_of_times_to_target_when_both_reached_it() -> None:
    slow = result("bsp", target=0.9, time_to_target_s=30.0, samples_per_s=100.0)
    fast = result("dssp", target=0.9, time_to_target_s=12.0, samples_per_s=900.0)
    found = compare([slow, fast])
    assert [row.speedup for row in found.rows] == ["1.00×", "2.50×"]
    assert "by time to target." in found.caption


def test_speedup_without_target_is_the_ratio_of_times_for_the_same_samples() -> None:
    slow = result("bsp", seconds=40.0, samples=4000, samples_per_s=100.0)
    fast = result("asp", seconds=10.0, samples=3000, samples_per_s=300.0)
    found = compare([fast, slow])
    assert [row.speedup for row in found.rows] == ["3.00×", "1.00×"]
    assert "by time for the same samples." in found.caption


def test_speedups_of_two_kinds_are_told_apart() -> None:
    runs = [
        result("bsp", target=0.9, time_to_target_s=30.0, samples_per_s=100.0),
        result("ssp", target=0.9, time_to_target_s=20.0, samples_per_s=100.0),
        result("asp", target=0.9, samples_per_s=300.0),
    ]
    found = compare(runs)
    assert [row.speedup for row in found.rows] == ["1.00×", "1.50×", "3.00×*"]
    assert "* by time for the same samples" in found.caption


def test_no_speedup_without_a_bsp_run_of_the_same_clock() -> None:
    assert speedups([result("ssp", samples_per_s=1.0)]) == [None]
    mixed = [result("bsp", samples_per_s=1.0), result("ssp", samples_per_s=2.0, simulated=True)]
    assert speedups(mixed)[1] is None


def test_a_balanced_run_is_named_so_and_never_the_one_to_compare_with() -> None:
    balanced = result("bsp", samples_per_s=300.0, balance=True)
    plain = result("bsp", samples_per_s=100.0)
    found = compare([balanced, plain])
    assert [(row.label, row.speedup) for row in found.rows] == [("bsp + balance", "3.00×"), ("bsp", "1.00×")]
    assert "Balance: batches in proportion to each worker's speed." in found.caption
    assert "Balance" not in compare([plain]).caption
    assert text(summary(balanced)).startswith("bsp + balance")


def test_a_run_over_another_fabric_than_shared_memory_is_named_so() -> None:
    runs = [result("allreduce", fabric=fabric) for fabric in ("gloo", "shared")]
    assert labels(runs) == ["allreduce over gloo", "allreduce"]
    assert text(summary(runs[0])).startswith("allreduce over gloo")


def test_waiting_is_written_per_worker_and_for_many_as_mean_and_max() -> None:
    few = result(waiting_share=[0.58, 0.56, None, 0.0])
    many = result(waiting_share=[0.2] * 8 + [0.65])
    assert compare([few]).rows[0].waiting == "58 56 — 0 %"
    assert compare([many]).rows[0].waiting == "mean 25 %, max 65 %"


def test_caption_says_what_was_emulated_or_simulated() -> None:
    slowed = result(emulated={"slow": {"3": 2.5}, "device_time_s": 0.02, "jitter": 0.1})
    assert "Emulated: rank 3 slowed 2.5×, device time 20 ms, jitter 10 %." in compare([slowed]).caption
    cluster = {"compute": {"kind": "fixed"}, "slow": {"3": 2.5}, "links": {}}
    assert "Simulated." in compare([result(simulated=True)]).caption
    assert "Simulated: rank 3 slowed 2.5×." in compare([result(simulated=True, emulated=cluster)]).caption
    assert "mulated" not in compare([result()]).caption
    assert "compare with care" in compare([slowed, result()]).caption


def test_runs_that_look_alike_are_told_apart_and_unfinished_ones_marked() -> None:
    twins = [result(run="a"), result(run="b", status="failed"), result("ssp", settings={"staleness": 3})]
    assert labels(twins) == ["bsp (a)", "bsp (b) [failed]", "ssp"]


@pytest.mark.parametrize("width", [80, 100])
def test_table_of_four_workers_fits_and_loses_no_figure(width: int) -> None:
    runs = [SyntheticRun(name, slow={3: 2.5}, pushes=200) for name in ("bsp", "ssp", "dssp", "asp")]
    results = [tally(run.events()).result() for run in runs]
    shown = text(comparison(results), width)
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    for row in compare(results).rows:
        assert all(figure in shown for figure in row[1:] if figure != DASH)


def test_a_narrow_terminal_loses_columns_and_says_which_but_cuts_no_figure() -> None:
    runs = [SyntheticRun(name, slow={3: 2.5}, pushes=200) for name in ("bsp", "asp")]
    results = [tally(run.events()).result() for run in runs]
    results.append(msgspec.structs.replace(results[0], balance=True))
    shown = text(comparison(results, 70), 70)
    assert "…" not in shown
    assert "gap" not in shown.splitlines()[0]
    assert "Left out, for want of room: gap" in " ".join(shown.split())
    assert "Left out" not in text(comparison(results, 120), 120)


def test_summary_tells_status_failures_and_unknowns() -> None:
    died = tally(SyntheticRun("ssp", dies=(2, 50), slow={3: 2.5}, pushes=120).events()).result()
    shown = text(summary(died))
    assert "ssp staleness=3 · 4 workers · finished" in shown
    assert "rank 2 died" in shown
    assert "killed by signal 9" in shown
    assert "rank 3 slowed 2.5×" in shown
    assert "accuracy   —" in text(summary(msgspec.structs.replace(died, accuracy=None, target=None)))


def test_summary_says_why_there_is_no_loss_and_how_many_of_the_due_samples_were_done() -> None:
    silent, lost = result(loss_missing="unreported"), result(loss_missing="not finite")
    assert "loss       — (the script does not call pace.report(loss=...))" in text(summary(silent))
    assert "training diverged" in text(summary(lost))
    assert "(" not in text(summary(result(loss=0.5))).split("loss")[1].splitlines()[0]
    assert "720 of 960 at" in text(summary(result(samples=720, samples_due=960)))
    assert "720 at" in text(summary(result(samples=720)))


def test_summary_says_whose_time_was_spent_waiting_and_between_whom_the_gap_is() -> None:
    shown = text(summary(result(waiting_share=[0.52, None, 0.0, 0.01], max_clock_gap=5)))
    assert "52 %, —, 0 %, 1 % of the time of ranks 0 to 3" in shown
    assert "5 iterations between the fastest and the slowest worker" in shown
    assert "3 % of its time" in text(summary(result(workers=1, waiting_share=[0.03])))


def test_summary_says_why_there_is_no_accuracy_and_leaves_out_what_a_simulation_does_not_know() -> None:
    assert "accuracy   — (the script reports none, see pace.evaluate)" in text(summary(result()))
    shown = text(summary(result(simulated=True, updates=9)))
    assert "finished after 10.0 s (simulated)" in shown
    assert "accuracy" not in shown
    assert "loss" not in shown


def test_summary_tells_the_share_of_local_steps_where_there_is_one() -> None:
    shown = text(summary(result("selsync", lssr=0.9)))
    assert "local steps" in shown
    assert "90 % (LSSR)" in shown
    assert "LSSR" not in text(summary(result("allreduce")))


def test_summary_tells_what_osp_put_off_and_what_dpsgd_measured() -> None:
    shown = text(summary(result("osp", sent_ahead=0.4375, consensus_distance=0.125)), 160)
    assert "put off    44 % of the bytes sent, while workers went on" in shown
    assert "apart      0.125 from the mean of all replicas, when last measured" in shown
    measured = LandscapeSummary(12, 0.75, 0.5, 0.9, 0.01, 0.25)
    shown = text(summary(result("dpsgd", landscape=measured)), 160)
    assert "75 % of the learning rate on average, lowest 50 %, last 90 %" in shown
    assert "variance of the weights up to 0.01, noise up to 0.25" in shown
    plain = text(summary(result("allreduce")), 160)
    assert not any(word in plain for word in ("put off", "apart", "effective rate"))


def test_words_of_a_run_are_never_read_as_terminal_markup() -> None:
    assert "[red]x[/red]" in text(summary(result(settings={"note": "[red]x[/red]"})))


@pytest.mark.parametrize(("columns", "whole"), [(None, True), ("40", False)])
def test_a_table_in_a_pipe_is_whole_unless_columns_say_otherwise(
    monkeypatch: pytest.MonkeyPatch, columns: str | None, whole: bool
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    shown = io.StringIO()
    many = [result(p, waiting_share=[0.5] * 12, max_clock_gap=3, samples_per_s=1e6) for p in ("bsp", "asp")]
    print_comparison(many, Console(file=shown))
    assert (" gap " in shown.getvalue().splitlines()[0]) == whole
    assert ("Left out" in shown.getvalue()) != whole


def test_a_figure_that_is_not_of_the_end_says_of_when_it_is_wherever_it_stands() -> None:
    early = Moment(1.0, 3200, 100, 0)
    known = {"accuracy": 0.481, "samples": 9600, "updates": 300, "accuracy_at": early}
    lost = result(**known, failures=[Failure(0, 1.5, "died", "")])
    assert "48.1 % at sample 3,200 of 9,600: not evaluated after rank 0 was lost" in text(summary(lost), 140)
    assert "Accuracy of bsp at sample 3,200 of 9,600: not evaluated" in compare([lost]).caption
    other = result(**known, failures=[Failure(1, 1.5, "died", "")])
    assert "48.1 % at sample 3,200 of 9,600\n" in squeezed(text(summary(other), 140))
    uncounted = msgspec.structs.replace(other, samples=None)
    assert "48.1 % at update 100 of 300\n" in squeezed(text(summary(uncounted), 140))
    end = msgspec.structs.replace(other, accuracy_at=msgspec.structs.replace(early, samples=9600))
    assert "48.1 %\n" in squeezed(text(summary(end), 140))
    assert "Accuracy" not in compare([end]).caption
    gone = msgspec.structs.replace(end, failures=[Failure(0, 1.5, "died", "")])
    assert "48.1 % before rank 0 was lost\n" in squeezed(text(summary(gone), 140))


def squeezed(shown: str) -> str:
    return "\n".join(line.rstrip() for line in shown.splitlines()) + "\n"
