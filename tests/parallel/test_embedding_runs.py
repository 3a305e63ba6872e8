"""Embedding tables in real runs on a mesh: equal to one process, whole when saved, mistakes in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.trace.events import Evaluated, LookedUp
from support.runs import SCRIPTS, Lab, Run
from support.shell import Shell

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GRID = {"data": 2, "shard": 2}


def tabled(lab: Lab, *args: object, mesh: dict[str, int] | None = None, **dials: Any) -> Run:
    run = lab.run("clicks.py", *args, workers=4, mesh=mesh or GRID, **dials)
    assert run.result.status == "finished", run.end.detail
    return run


def stopped_before(iteration: int, lab: Lab, *args: object, **dials: Any) -> Run:
    running = lab.start("clicks.py", *args, *lab.pause(iteration), **dials)
    lab.until_paused(running.config.workers)
    running.stop()
    lab.go_on()
    run = lab.finish(running)
    assert run.result.status == "stopped", run.end.detail
    return run


def close(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    for name, tensor in some.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-5, atol=1e-6)


def test_a_run_on_four_workers_trains_what_one_process_trains(lab: Lab) -> None:
    """The whole model: tables by SGD, the rest averaged over all, whichever seeds scripts begin with."""
    alone = lab.trained("clicks.py", "--batch", 12, workers=1)
    run = tabled(lab, "--fault", "seeds", "--sharding", "row")
    close(run.weights, alone.weights)
    assert run.result.samples == 96
    assert set(run.result.bytes_by_axis or {}) == {"data", "shard"}
    assert all(size > 0 for size in (run.result.bytes_by_axis or {}).values())
    told = run.result.lookups
    assert told is not None
    assert {event.worker for event in run.of(LookedUp)} == {0, 1, 2, 3}
    assert sum(told.ids) >= 96 * 4
    assert 1 <= told.imbalance <= 4
    assert told.lookup_ms[told.straggler] == max(told.lookup_ms)
    assert 0 < told.latency_ms <= told.longest_ms


@pytest.mark.parametrize(
    ("sharding", "again"), [("column", "row"), pytest.param("row", "table", marks=pytest.mark.long)]
)
def test_a_stopped_run_goes_on_with_another_sharding_and_other_groups(
    lab: Lab, sharding: str, again: str
) -> None:
    """It begins with the weights that were saved: with a rate of 0, they are what it ends with."""
    args = ("--epochs", 3, "--sharding", sharding, "--optimizer", "adagrad")
    stopped = stopped_before(6, lab, *args, workers=4, mesh=GRID)
    resumed = lab.run(
        "clicks.py",
        *("--epochs", 3, "--sharding", again, "--optimizer", "adagrad", "--lr", 0),
        workers=2,
        mesh={"data": 2, "shard": 1},
        resume=str(stopped.folder / "checkpoint"),
    )
    assert resumed.result.status == "finished", resumed.end.detail
    assert (stopped.result.samples or 0) + (resumed.result.samples or 0) == 3 * 48
    for name in ("tables.a.weight", "tables.b.weight", "top.weight"):
        assert torch.equal(resumed.weights[name], stopped.weights[name])
    assert resumed.weights["tables.a.weight"].shape == (19, 4)


def test_moments_go_on_where_they_were(lab: Lab) -> None:
    """Row-wise AdaGrad, tables split by columns: a resumed run is the uninterrupted one."""
    args = ("--epochs", 3, "--sharding", "column", "--optimizer", "adagrad")
    whole = tabled(lab, *args)
    stopped = stopped_before(6, lab, *args, workers=4, mesh=GRID)
    resumed = tabled(lab, *args, resume=str(stopped.folder / "checkpoint"))
    assert resumed.weights.keys() == whole.weights.keys()
    assert "tables.a.sum" in whole.weights
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)
    losses = [e.values["loss"] for run in (stopped, resumed) for e in run.of(Evaluated)]
    assert losses == [e.values["loss"] for e in whole.of(Evaluated)]


def test_moments_of_a_lone_run_go_on_where_they_were(lab: Lab) -> None:
    args = ("--epochs", 3, "--optimizer", "adagrad")
    whole = lab.trained("clicks.py", *args, workers=1)
    stopped = stopped_before(20, lab, *args, workers=1)
    resumed = lab.trained("clicks.py", *args, workers=1, resume=str(stopped.folder / "checkpoint"))
    assert "tables.a.sum" in whole.weights
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--budget", 300), "the 2 workers of a group have 0.0 MB together"),
        (("--fault", "ids"), "table 'a': id 19 is out of range, it has 19 rows. Use ids from 0 to 18"),
        pytest.param(("--optimizer", "Adam"), "cannot be trained by Adam", marks=pytest.mark.long),
        pytest.param(("--fault", "untrained"), "no optimizer trains the embedding", marks=pytest.mark.long),
        (("--fault", "unstepped"), "embedding tables was not stepped"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do_and_status_2(
    shell: Shell, args: tuple[object, ...], said: str
) -> None:
    done = shell("train", SCRIPTS / "clicks.py", "--mesh", "data=2,shard=2", "--", *args)
    assert done.code == 2
    assert said in done.error


def test_a_mesh_without_the_axis_is_refused_with_one_that_has_it(shell: Shell) -> None:
    done = shell("train", SCRIPTS / "clicks.py", "--mesh", "data=2")
    assert done.code == 2
    assert "but the mesh is data=2. Use for instance --mesh data=2,shard=2." in done.error


def test_the_example_splits_the_large_table_and_reports_its_lookups(shell: Shell) -> None:
    args = ("--epochs", 1, "--samples", 4000)
    done = shell("train", EXAMPLES / "dlrm_clicks.py", "--mesh", "data=2,shard=2", "--", *args)
    assert done.code == 0, done.err
    log = (shell.runs / "latest" / "logs" / "rank0.log").read_text()
    assert "table user: 60,000 x 16, row-wise on 0, 1" in log
    page = shell.runs / "report.html"
    assert shell("report", shell.runs / "latest", "--out", page).code == 0
    assert "Lookups in embedding tables" in page.read_text()
