"""Runs on a mesh with an ordinary loop: the same numbers as one process, stops, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.trace.events import Decided, Evaluated
from support.runs import Lab, Run


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in one.keys() | other.keys():
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


def meshed(lab: Lab, *args: object, **dials: object) -> Run:
    return lab.trained("rows.py", *args, **({"workers": 2, "mesh": {"data": 2}} | dials))


def test_copies_train_as_one_process_with_their_batches_together(lab: Lab) -> None:
    """The last batch is uneven, and the scheduler steps once per update."""
    args = ("--samples", 44, "--schedule", "--clip", 0.5)
    alone = lab.trained("rows.py", *args, "--batch", 8, workers=1)
    copies = meshed(lab, *args)
    close(copies.weights, alone.weights)
    assert copies.result.samples == 88
    assert copies.result.updates == alone.result.updates == 12
    assert (copies.result.bytes_by_axis or {})["data"] > 0
    assert len(copies.of(Evaluated)) == 2


def test_a_loader_with_a_generator_keeps_the_order_of_one_process(lab: Lab) -> None:
    args = ("--samples", 44, "--shuffle", "alike")
    alone = lab.trained("rows.py", *args, "--batch", 8, workers=1)
    close(meshed(lab, *args).weights, alone.weights)


def test_gradients_of_several_batches_make_one_step(lab: Lab) -> None:
    alone = lab.trained("rows.py", "--every", 3, "--batch", 8, workers=1)
    copies = meshed(lab, "--every", 3)
    close(copies.weights, alone.weights)
    assert copies.result.samples == 96
    assert copies.result.updates == 4


def test_a_stopped_run_goes_on_where_it_was(lab: Lab) -> None:
    whole = meshed(lab, "--epochs", 3, "--schedule")
    args = ("--epochs", 3, "--schedule")
    running = lab.start("rows.py", *args, *lab.pause(9), workers=2, mesh={"data": 2})
    lab.until_paused(2)
    running.stop()
    lab.go_on()
    stopped = lab.finish(running)
    assert stopped.result.status == "stopped", stopped.end.detail
    assert 0 < stopped.result.updates < 18
    resumed = meshed(lab, *args, resume=str(stopped.folder / "checkpoint"))
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)
    evaluated = [e.values["loss"] for run in (stopped, resumed) for e in run.of(Evaluated)]
    assert evaluated == [e.values["loss"] for e in whole.of(Evaluated)]


def test_training_that_the_lead_ends_ends_for_all_before_the_same_iteration(lab: Lab) -> None:
    run = meshed(lab, "--epochs", 50, "--stop", 7)
    assert 6 <= run.result.updates < 100
    clocks = [max(e.clock for e in run.of(Decided) if e.pushed == rank) for rank in range(2)]
    assert len(set(clocks)) == 1


def test_what_workers_gather_is_everybodys_and_not_ones_own(lab: Lab) -> None:
    assert "[0, 1, 1]" in meshed(lab, "--gather", "--epochs", 1).log()


@pytest.mark.parametrize(
    ("args", "mesh", "said"),
    [
        (("--unsplit",), {"model": 2}, "the mesh has model=2, but nothing is split along it"),
        (
            ("--unsplit",),
            {"stage": 2},
            "nothing is split along it before pace.prepare(). Use paceline.parallel.pipeline",
        ),
        (("--shuffle", "apart"), {"data": 2}, "generator has different states on ranks 0 and 1"),
        (("--shares",), {"data": 2}, "the loader has a DistributedSampler"),
        (("--optimizer", "LBFGS"), {"data": 2}, "optimizer LBFGS cannot run on several workers"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do(
    lab: Lab, args: tuple[object, ...], mesh: dict[str, int], said: str
) -> None:
    run = lab.run("rows.py", *args, workers=2, mesh=mesh)
    assert run.result.status == "failed"
    assert run.end.user_mistake, run.end.detail
    assert said in run.end.detail
