"""Row-split layers between real processes: one process's numbers, losses, checkpoints for another mesh."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import Tensor

from paceline.parallel.parts import read_mesh_checkpoint
from paceline.store.disk.folders import all_saved_in
from paceline.trace.events import Evaluated, Kept, Note
from support.runs import Lab, Run, wait_until


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in one.keys() | other.keys():
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


def split(lab: Lab, *args: object, **dials: object) -> Run:
    mesh = dials.setdefault("mesh", {"model": 2})
    workers = 1
    for size in mesh.values():  # type: ignore[attr-defined]
        workers *= size
    return lab.trained("rows.py", *args, **({"workers": workers, "protocol": "row_split"} | dials))


def test_three_workers_train_as_one_process_with_dropout_and_clipping(lab: Lab) -> None:
    """Invariant 1 with real processes: neither 18 nor 17 outputs are divided by 3 without a rest."""
    args = ("--norm", "--schedule", "--drop", 0.2, "--clip", 0.5)
    alone = lab.trained("rows.py", *args, workers=1)
    three = split(lab, *args, mesh={"model": 3})
    close(three.weights, alone.weights)
    assert three.result.samples == alone.result.samples == 96
    assert three.result.updates == alone.result.updates == 24
    losses = [[e.values["loss"] for e in run.of(Evaluated)] for run in (three, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert "cost model" in three.log()
    assert (three.result.bytes_by_axis or {})["model"] > 0


def test_torchs_own_clipping_is_spoken_of_once_and_ours_is_not(lab: Lab) -> None:
    def said(run: Run) -> list[str]:
        return [note.text for note in run.of(Note) if "changes gradients" in note.text]

    own = split(lab, "--own-clip", 0.5, mesh={"model": 2})
    assert len(said(own)) == 1
    assert "pace.clip_grad_norm_" in said(own)[0]
    assert not said(split(lab, "--clip", 0.5, mesh={"model": 2}))


def test_the_bytes_of_a_run_are_those_of_the_papers_table(lab: Lab) -> None:
    """Invariant 5: 18 and 17 outputs are gathered, the gradient of the 18 is reduced."""
    run = split(lab, "--epochs", 1)
    batches, batch, workers = 12, 4, 2
    step = (2 * 18 + 17) * batch
    forward = (18 + 17) * 48
    expected = (batches * step + forward) * 4 * (workers - 1)
    assert (run.result.bytes_by_axis or {})["model"] == expected


def test_a_grid_trains_as_its_axes_do(lab: Lab) -> None:
    """Invariant 3: data x model is data parallel, split once more; the last batch is uneven (invariant 2)."""
    alone = lab.trained("rows.py", "--samples", 44, "--batch", 8, workers=1)
    grid = split(lab, "--samples", 44, mesh={"data": 2, "model": 2})
    close(grid.weights, alone.weights)
    averaged = split(lab, "--samples", 44, mesh={"data": 2, "model": 1}, settings={"mode": "avg", "every": 1})
    momentum_is_linear = alone
    close(averaged.weights, momentum_is_linear.weights)
    assert set(grid.result.bytes_by_axis or {}) == {"data", "model"}


@pytest.mark.parametrize(("workers", "again"), [(3, 2), (2, 4)])
def test_a_stopped_run_goes_on_with_another_number_of_workers(lab: Lab, workers: int, again: int) -> None:
    """Invariant 4: a checkpoint written with M is read with M'; it is whole."""
    whole = split(lab, "--epochs", 3, "--norm", "--schedule")
    args = ("--epochs", 3, "--norm", "--schedule")
    dials = {"workers": workers, "mesh": {"model": workers}, "protocol": "row_split"}
    running = lab.start("rows.py", *args, *lab.pause(17), **dials)
    lab.until_paused(workers)
    running.stop()
    lab.go_on()
    stopped = lab.finish(running)
    assert stopped.result.status == "stopped", stopped.end.detail
    assert {n: t.shape for n, t in stopped.weights.items()} == {n: t.shape for n, t in whole.weights.items()}
    resumed = split(lab, *args, mesh={"model": again}, resume=str(stopped.folder / "checkpoint"))
    close(resumed.weights, whole.weights)
    assert stopped.result.samples + resumed.result.samples == whole.result.samples


def test_a_killed_worker_ends_the_run_with_its_place_named_and_the_run_goes_on(lab: Lab) -> None:
    dials = {"workers": 4, "mesh": {"data": 2, "model": 2}, "protocol": "row_split"}
    slowly = ("--before", 11, "--slowly", 0.2)  # far from its end when the checkpoint is there
    running = lab.start("rows.py", "--epochs", 20, *slowly, checkpoint_every="10", **dials)
    wait_until(lambda: running.events(Kept) >= 1, "a checkpoint is kept")
    running.kill(3)
    killed = lab.finish(running)
    assert killed.result.status == "failed"
    assert killed.end.detail.startswith("rank 3 (data 1, model 1) died")
    assert killed.ended.statuses[3] == -signal.SIGKILL
    kept = killed.of(Kept)[-1]
    resumed = split(
        lab, "--epochs", 20, mesh={"data": 2, "model": 2}, resume=str(killed.folder / "checkpoint")
    )
    assert resumed.result.samples + kept.samples == 20 * 48


def test_a_checkpoint_that_is_due_is_taken_once_and_holds_what_it_says(lab: Lab) -> None:
    dials = {"workers": 2, "mesh": {"model": 2}, "protocol": "row_split", "checkpoint_every": "10", "keep": 9}
    enough = lab.root / "enough"
    running = lab.start("rows.py", "--epochs", 100_000, "--raises", 1, "--when", enough, **dials)
    wait_until(lambda: running.events(Kept) > 1, "checkpoints are kept")
    enough.touch()
    run = lab.finish(running)
    assert run.result.status == "failed"
    kept = [each.version for each in run.of(Kept)]
    found = [read_mesh_checkpoint(each).state.updates for each in all_saved_in(run.folder)]
    assert found[::-1] == kept[-9:]
    assert not list(run.folder.glob("parts*"))


@pytest.mark.parametrize(
    ("args", "dials", "said"),
    [
        (("--optimizer", "Adafactor"), {}, "uses whole tensors, or may do so"),
        ((), {"settings": {"smallest": 64}}, "finds no layer to split over 2 workers"),
        ((), {"mesh": {"stage": 2}, "protocol": "allreduce"}, "the mesh has stage=2, but nothing is split"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do(
    lab: Lab, args: tuple[object, ...], dials: dict[str, object], said: str
) -> None:
    run = lab.run("rows.py", *args, **({"workers": 2, "mesh": {"model": 2}, "protocol": "row_split"} | dials))
    assert run.end.user_mistake, run.end.detail
    assert said in run.end.detail


def test_weights_that_do_not_fit_one_workers_budget_train_on_four(lab: Lab) -> None:
    """The budget is enforced by the kernel: 96 MiB of weights, 80 MiB for each worker, gradients included."""
    alone = lab.run("wide.py", 80, workers=1)
    assert alone.result.status == "failed"
    assert "memory" in alone.end.detail.lower() + alone.logs().lower()
    four = lab.trained("wide.py", 80, workers=4, mesh={"model": 4}, protocol="row_split")
    assert four.result.updates == 4
    weights, own = (int(four.log().split(word)[1].split()[0].rstrip(",")) for word in ("weights ", "own "))
    assert own < weights / 3.9
    assert "24 layers over 4 workers, 1 kept whole" in four.log()
    sent = 4 * (23 * 2 + 1) * 1024 * 4 * 4 * 3  # batches, gathers and reductions, width, batch, bytes, M-1
    assert (four.result.bytes_by_axis or {})["model"] == sent


def test_a_grid_prints_the_cost_model_beside_what_was_measured(lab: Lab) -> None:
    log = split(lab, "--epochs", 1, mesh={"data": 2, "model": 2}).log()
    rows = [line.split() for line in log.splitlines() if line.startswith("  ") and "model" not in line]
    figures = {row[0]: row[-2:] for row in rows}
    assert figures["synchronisations"] == ["3", "3"]
    model, measured = map(int, figures["bytes"])
    assert measured == model
