"""Pipelines between real processes: the same numbers as one process, and what becomes of losses and stops."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.trace.events import Decided, Evaluated, Kept, WorkerLeft
from support.recurrence import cut, recurrence, rule_of, whole
from support.runs import Lab, Run, wait_until

TWO = {"workers": 2, "mesh": {"stage": 2}, "protocol": "bp"}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in one.keys() | other.keys():
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


def piped(lab: Lab, *args: object, **dials: object) -> Run:
    mesh = dials.setdefault("mesh", {"stage": 4})
    workers = 1
    for size in mesh.values():  # type: ignore[attr-defined]
        workers *= size
    return lab.trained("pipe.py", *args, **({"workers": workers} | dials))


def test_without_delays_four_stages_train_bit_for_bit_as_one_process(lab: Lab) -> None:
    alone = lab.trained("pipe.py", "--schedule", "--norm", workers=1)
    split = piped(lab, "--schedule", "--norm", protocol="bp")
    assert same(split.weights, alone.weights)
    assert split.result.samples == alone.result.samples == 96
    assert split.result.updates == alone.result.updates == 24
    assert split.log() == alone.log()
    assert split.result.bytes_by_axis is not None
    assert split.result.bytes_by_axis["stage"] > 0


def test_a_loader_with_a_generator_keeps_the_order_of_one_process(lab: Lab) -> None:
    alone = lab.trained("pipe.py", "--shuffle", "alike", workers=1)
    split = piped(lab, "--shuffle", "alike", protocol="bp", mesh={"stage": 2})
    assert same(split.weights, alone.weights)


def test_a_block_that_stands_twice_computes_twice(lab: Lab) -> None:
    """One activation for all layers, as many write it."""
    alone = lab.trained("pipe.py", "--fault", "twice", workers=1)
    assert same(piped(lab, "--fault", "twice", protocol="bp").weights, alone.weights)


def test_sleeps_change_no_bit_of_layerwise_weights(lab: Lab) -> None:
    dials = {"protocol": "layerwise", "settings": {"p": "2,1,0,0", "m": "6,3,1,0"}}
    plain = piped(lab, "--norm", **dials)
    shaken = piped(lab, "--norm", device_time_s=0.002, jitter=0.9, slow={1: 4.0, 3: 2.0}, **dials)
    assert same(shaken.weights, plain.weights)
    assert plain.result.staleness is not None
    assert plain.result.staleness.max == 6
    assert plain.result.updates == 24
    assert not same(plain.weights, piped(lab, "--norm", protocol="bp").weights)


def test_adl_averages_its_batches_and_follows_the_scheduler_on_real_workers(lab: Lab) -> None:
    """11 batches: the last update has one. A batch's rate is that of the update it begins."""
    run = piped(lab, "--epochs", 1, "--samples", 44, "--schedule", protocol="adl", settings={"every": "2"})
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    model, cuts = nn.Sequential(*layers, nn.Linear(6, 3)), (1, 2, 3)
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(44, 6, generator=draw), torch.randint(0, 3, (44,), generator=draw)
    batches = list(zip(x.split(4), y.split(4), strict=True))
    trained = recurrence(
        cut(model, cuts),
        batches,
        rule_of("adl", 4),
        rate=lambda batch: 0.05 * 0.5 ** (batch // 5),
        momentum=0.9,
    )
    close(run.weights, whole(model, cuts, trained))
    assert run.result.updates == 6


def test_copies_under_allreduce_train_as_one_process_with_their_batches_together(lab: Lab) -> None:
    """S x 1 = lockstep data parallel, and the grid S x K is the same split once more."""
    alone = lab.trained("pipe.py", "--samples", 44, "--batch", 8, workers=1)
    copies = piped(lab, "--samples", 44, protocol="bp", mesh={"data": 2, "stage": 1})
    grid = piped(lab, "--samples", 44, protocol="bp", mesh={"data": 2, "stage": 2})
    close(copies.weights, alone.weights)
    close(grid.weights, copies.weights)
    assert grid.result.samples == 88
    assert set(grid.result.bytes_by_axis or {}) == {"data", "stage"}
    assert all(size > 0 for size in (grid.result.bytes_by_axis or {}).values())


def test_gossip_on_a_complete_graph_after_the_step_is_all_reduce_for_sgd(lab: Lab) -> None:
    mesh = {"data": 2, "stage": 2}
    gossip = "dpsgd:topology=complete:order=adapt_then_combine"
    mixed = piped(lab, protocol="fdg", settings={"data": gossip}, mesh=mesh)
    reduced = piped(lab, protocol="fdg", mesh=mesh)
    local = piped(lab, protocol="fdg", settings={"data": "local_sgd:period=1"}, mesh=mesh)
    close(mixed.weights, reduced.weights)
    close(local.weights, reduced.weights)


def test_a_killed_worker_ends_the_run_at_once_with_rank_and_stage_named(lab: Lab) -> None:
    """Without an end of its own: it is among its iterations whenever that happens."""
    dials = {"workers": 4, "mesh": {"data": 2, "stage": 2}, "protocol": "layerwise"}
    running = lab.start("pipe.py", "--epochs", 100_000, **dials)
    running.until_pushes(20)
    running.kill(3)
    run = lab.finish(running)
    assert run.result.status == "failed"
    assert run.end.detail.startswith("rank 3 (data 1, stage 1) died")
    assert run.died == {3}
    assert [f.worker for f in run.result.failures] == [3]
    assert run.ended.statuses[3] == -signal.SIGKILL
    assert all(code >= 0 for rank, code in run.ended.statuses.items() if rank != 3)


def test_a_script_that_fails_on_one_stage_is_named_and_not_its_neighbours(lab: Lab) -> None:
    run = lab.run("pipe.py", "--raises", 2, workers=4, mesh={"stage": 4})
    assert run.result.status == "failed"
    assert run.end.detail == "rank 2 (stage 2) failed: ValueError: the script is at fault"


@pytest.mark.parametrize(("stages", "again"), [(4, 2), (2, 4)])
def test_a_stopped_run_goes_on_with_another_number_of_stages(lab: Lab, stages: int, again: int) -> None:
    whole = piped(lab, "--epochs", 3, "--schedule", "--norm", protocol="bp", mesh={"stage": 2})
    args = ("--epochs", 3, "--schedule", "--norm")
    dials = {"workers": stages, "mesh": {"stage": stages}, "protocol": "bp"}
    running = lab.start("pipe.py", *args, *lab.pause(17), **dials)
    lab.until_paused(stages)
    running.stop()
    lab.go_on()
    stopped = lab.finish(running)
    assert stopped.result.status == "stopped", stopped.end.detail
    assert 0 < stopped.result.updates < 36
    resumed = piped(
        lab,
        *args,
        protocol="bp",
        mesh={"stage": again},
        resume=str(stopped.folder / "checkpoint"),
    )
    assert same(resumed.weights, whole.weights)
    assert stopped.result.samples + resumed.result.samples == whole.result.samples
    evaluated = [e.values["loss"] for run in (stopped, resumed) for e in run.of(Evaluated)]
    assert evaluated == [e.values["loss"] for e in whole.of(Evaluated)]


def test_what_was_killed_goes_on_from_its_last_checkpoint(lab: Lab) -> None:
    args, dials = ("--epochs", 4, "--norm"), {"protocol": "layerwise", "workers": 4, "mesh": {"stage": 4}}
    slowly = ("--before", 11, "--slowly", 0.2)  # far from its end when the checkpoint is there
    running = lab.start("pipe.py", *args, *slowly, checkpoint_every="10", **dials)
    wait_until(lambda: running.events(Kept) >= 1, "a checkpoint is kept")
    running.kill(1)
    killed = lab.finish(running)
    assert killed.result.status == "failed"
    assert "rank 1 (stage 1) died" in killed.end.detail
    kept = killed.of(Kept)[-1]
    resumed = piped(lab, *args, resume=str(killed.folder / "checkpoint"), **dials)
    assert resumed.result.samples + kept.samples == 4 * 48
    assert not (resumed.folder / "checkpoint").exists()
    assert not (resumed.folder / "parts").exists()


def test_training_that_the_lead_ends_ends_for_all_before_the_same_iteration(lab: Lab) -> None:
    run = piped(lab, "--epochs", 50, "--stop", 7, protocol="layerwise")
    assert 6 <= run.result.updates < 100
    clocks = [max(e.clock for e in run.of(Decided) if e.pushed == rank) for rank in range(4)]
    assert len(set(clocks)) == 1
    assert [e.reason for e in run.of(WorkerLeft)] == ["finished"] * 4


@pytest.mark.parametrize(
    ("args", "dials", "said"),
    [
        (("--fault", "shared"), {}, "are one parameter, but lie on stages 0 and 2"),
        (("--fault", "again"), {}, "0.0.weight and 2.0.weight are one parameter, but lie on stages 0 and 2"),
        (("--fault", "late"), {}, "a learning-rate scheduler that the pipeline was not given"),
        (("--fault", "tuple"), {}, "block '1' (LSTM) returned a tuple"),
        (("--fault", "whole"), {}, "is on another stage: this worker cannot call the whole model"),
        (("--fault", "forward"), TWO, "has a forward of its own, and a pipeline computes the blocks only"),
        (("--fault", "hooks"), TWO, "has hooks, and a pipeline computes the blocks only"),
        (("--fault", "tensors"), TWO, "has a tensor 'mean' of its own, and a pipeline computes the blocks"),
        (("--fault", "beside"), TWO, "a parameter of shape (7,) that is not in the model"),
        (("--fault", "unfrozen"), TWO, "requires a gradient now: '0.0.weight'. Prepare it unfrozen"),
        ((), {"mesh": {"stage": 5}, "workers": 5}, "4 blocks, and the mesh 5 stages"),
        ((), {"protocol": "ssp"}, "needs a store, and a mesh has none"),
        (
            ("--optimizer", "Adam"),
            {"protocol": "fdg", "settings": {"predict": "true"}},
            "predict follows SGD",
        ),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do(
    lab: Lab, args: tuple[object, ...], dials: dict[str, object], said: str
) -> None:
    run = lab.run("pipe.py", *args, **({"workers": 4, "mesh": {"stage": 4}} | dials))
    assert run.result.status == "failed"
    assert run.end.user_mistake, run.end.detail
    assert said in run.end.detail


@pytest.mark.parametrize(("args", "rank"), [(("--fault", "tuple"), 1), (("--raises", 2), 2)])
def test_a_stage_that_fails_is_named_and_the_others_end_without_a_word(
    lab: Lab, args: tuple[object, ...], rank: int
) -> None:
    run = lab.run("pipe.py", *args, workers=4, mesh={"stage": 4}, protocol="fdg")
    assert run.end.detail.startswith(f"rank {rank} (stage {rank})")
    assert {f"rank{each}": run.log(f"rank{each}") for each in range(4) if each != rank} == {
        f"rank{each}": "" for each in range(4) if each != rank
    }
    assert ("ValueError: the script is at fault" in run.log(f"rank{rank}")) == (rank == 2)
    assert [e.worker for e in run.of(WorkerLeft) if e.reason == "failed"] == [rank]


def test_an_exchange_that_nobodys_failure_explains_shows_where_it_broke_off(lab: Lab) -> None:
    run = lab.run("pipe.py", "--fault", "torn", workers=2, mesh={"stage": 2}, protocol="fdg")
    assert run.end.detail.startswith("rank 1 (stage 1) lost another worker: RuntimeError: gloo")
    assert 'raise RuntimeError("gloo lost its way")' in run.log("rank1")
    assert run.log("rank0") == ""


def test_a_mesh_that_was_not_asked_for_is_refused_with_the_flag(lab: Lab) -> None:
    run = lab.run("pipe.py", workers=4, protocol="allreduce")
    assert run.end.user_mistake
    assert "--mesh stage=4" in run.end.detail


def test_measured_cuts_are_told_and_every_stage_is_on_record(lab: Lab) -> None:
    run = piped(lab, "--fault", "measured", protocol="adl")
    assert "cut by measured time" in run.log()
    assert "stage 3: " in run.log()
    assert {e.pushed for e in run.of(Decided) if e.pushed is not None} == {0, 1, 2, 3}
    assert run.result.mesh == {"stage": 4}
    assert not [name for name in os.listdir(run.folder) if name == "parts"]
    assert Path(run.folder / "weights.safetensors").exists()
