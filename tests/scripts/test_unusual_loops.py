"""Loops with an unusual turn: they equal one process with the whole batch, or a note says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.trace.events import Note, Reported
from support.runs import Lab, Run, once
from support.tensors import assert_close

SCRIPT = Path(__file__).parent / "unusual_loops.py"


def trained(lab: Lab, case: str, workers: int, **dials: Any) -> Run:
    return lab.trained(SCRIPT, "--case", case, "--batch", 16 // workers, workers=workers, **dials)


@pytest.mark.parametrize("case", ["loader", "sampler", "whole", "uneven stream", "never cleared"])
@pytest.mark.parametrize("protocol", ["bsp", "allreduce"])
def test_in_lockstep_it_equals_one_process_with_the_whole_batch(lab: Lab, protocol: str, case: str) -> None:
    """A loader class of one's own, a sampler that is told the epoch, a dataset of whole batches, a
    stream whose batches do not divide, gradients that add up from step to step."""
    alone = trained(lab, case, 1)
    assert_close(trained(lab, case, 2, protocol=protocol).weights, alone.weights, 1e-12)


@pytest.mark.parametrize("case", ["next", "islice", "islice ahead"])
@pytest.mark.parametrize(
    "dials", [{"protocol": "bsp"}, {"protocol": "allreduce"}, {"protocol": "bsp", "shards": "equal"}]
)
def test_a_loop_that_takes_the_epochs_batches_and_no_end_has_whole_epochs(
    lab: Lab, dials: dict[str, Any], case: str
) -> None:
    alone, run = trained(lab, case, 1), trained(lab, case, 2, **dials)
    assert_close(run.weights, alone.weights, 1e-12)
    assert run.used() == once(2, 96)
    assert "broke off" not in notes(run)


@pytest.mark.parametrize(("protocol", "correct"), [("bsp", "none"), ("asp", "dc"), ("allreduce", "none")])
def test_a_step_leaves_gradients_alone_that_the_script_adds_to(lab: Lab, protocol: str, correct: str) -> None:
    """No mean of all, and nothing that was corrected for its staleness, takes their place."""
    run = trained(lab, "never cleared", 2, protocol=protocol, correct=correct)
    assert {event.values["moved"] for event in run.of(Reported) if "moved" in event.values} == {0.0}


@pytest.mark.parametrize("protocol", ["bsp", "allreduce"])
def test_a_gradient_of_zeros_counts_as_one_when_others_were_reached_more_often(
    lab: Lab, protocol: str
) -> None:
    """A loss of weight zero, with a backward pass of its own: weight decay goes on, as alone."""
    alone = trained(lab, "two losses", 1)
    assert_close(trained(lab, "two losses", 2, protocol=protocol).weights, alone.weights, 1e-12)


@pytest.mark.parametrize("protocol", ["bsp", "allreduce"])
def test_a_model_that_is_converted_after_prepare_is_trained_all_the_same(lab: Lab, protocol: str) -> None:
    """`model.to(memory_format=...)` moves gradients out of the memory that they are read from."""
    alone = trained(lab, "converted", 1)
    assert_close(trained(lab, "converted", 2, protocol=protocol).weights, alone.weights, 1e-12)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_lazy_layer_without_a_shape_is_refused_in_one_sentence(lab: Lab, workers: int) -> None:
    run = lab.run(SCRIPT, "--case", "lazy", workers=workers)
    assert "has no shape yet" in run.end.detail


def test_a_schedule_that_counts_one_workers_steps_is_noticed(lab: Lab) -> None:
    assert "no scheduler was prepared" in notes(trained(lab, "schedule", 2))
    assert "no scheduler was prepared" not in notes(trained(lab, "loader", 2))


def notes(run: Run) -> str:
    return "\n".join(event.text for event in run.of(Note))


def test_a_stream_that_divides_itself_is_read_whole_with_shards_own(lab: Lab) -> None:
    thinned = trained(lab, "stream", 2)
    assert thinned.result.samples == 96  # of 192: each worker keeps every other batch of its half
    assert "--shards own" in notes(thinned)
    whole = trained(lab, "stream", 2, shards="own")
    assert whole.result.samples == 192
    assert "--shards own" not in notes(whole)


def test_a_loop_that_breaks_off_is_told_that_the_epoch_goes_on(lab: Lab) -> None:
    assert "broke off a pass over the loader after 3 batches" in notes(trained(lab, "break", 2))


@pytest.mark.parametrize("protocol", ["bsp", "asp", "allreduce", "local_sgd"])
@pytest.mark.parametrize("case", ["ignored", "rebuilt"])
def test_a_loop_with_another_loader_than_prepare_gave_is_noticed(lab: Lab, case: str, protocol: str) -> None:
    assert "steps without batches from the loader that prepare gave" in notes(
        trained(lab, case, 2, protocol=protocol)
    )


@pytest.mark.parametrize("case", ["loader", "often", "uneven stream", "break"])
def test_a_loop_with_the_prepared_loader_hears_nothing_of_it(lab: Lab, case: str) -> None:
    assert "without batches from the loader" not in notes(trained(lab, case, 2, protocol="asp"))


def test_an_optimizer_that_was_not_prepared_is_noticed(lab: Lab) -> None:
    assert "no prepared optimizer stepped" in notes(trained(lab, "optimizer", 2, protocol="local_sgd"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_that_could_not_be_saved_is_refused_before_it_is_trained(lab: Lab, workers: int) -> None:
    run = lab.run(SCRIPT, "--case", "complex", workers=workers)
    assert run.result.status == "failed"
    assert "torch.complex128" in run.end.detail
    assert run.result.updates == 0


@pytest.mark.parametrize("protocol", ["bsp", "asp", "allreduce", "local_sgd"])
def test_a_buffer_that_the_model_replaces_is_saved_as_it_is_in_the_end(lab: Lab, protocol: str) -> None:
    assert trained(lab, "buffer", 2, protocol=protocol).weights["1.seen"] > 8


def test_weights_that_the_script_replaces_are_exchanged_where_they_are_its_own(lab: Lab) -> None:
    run = trained(lab, "data", 2, protocol="local_sgd")
    assert run.weights["2.weight"].abs().max() <= 0.1
    assert run.result.status == "finished"


@pytest.mark.parametrize("protocol", ["bsp", "asp", "allreduce"])
def test_weights_that_the_script_replaces_elsewhere_are_refused_by_name(lab: Lab, protocol: str) -> None:
    run = lab.run(SCRIPT, "--case", "data", workers=2, protocol=protocol)
    assert run.result.status == "failed"
    assert "wrote to '2.weight' by itself" in run.end.detail


@pytest.mark.parametrize("protocol", ["bsp", "local_sgd"])
def test_parameters_that_an_optimizer_gets_after_prepare_are_refused(lab: Lab, protocol: str) -> None:
    run = lab.run(SCRIPT, "--case", "group", workers=2, protocol=protocol)
    assert run.result.status == "failed"
    assert "new parameters after pace.prepare()" in run.end.detail
