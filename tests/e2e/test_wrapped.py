"""Loaders and optimizers that another library has wrapped train as they do unwrapped, or are refused."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from paceline.trace.events import Note
from support.runs import Lab, once
from support.tensors import assert_close

WRAPPERS = ["shape", *(["accelerate"] if find_spec("accelerate") else [])]


@pytest.mark.parametrize("by", WRAPPERS)
@pytest.mark.parametrize(
    "dials",
    [
        {"protocol": "bsp", "workers": 2},
        {"protocol": "allreduce", "workers": 2},
        {"protocol": "local_sgd", "workers": 2, "settings": {"period": 2}},
        {"workers": 1},
        {"workers": 2, "mesh": {"data": 2}},
    ],
)
def test_a_wrapped_loader_and_optimizer_train_as_what_is_in_them(
    lab: Lab, by: str, dials: dict[str, Any]
) -> None:
    plain, run = lab.trained("wrapped.py", **dials), lab.trained("wrapped.py", "--by", by, **dials)
    assert_close(run.weights, plain.weights, 1e-12)
    assert run.result.samples == run.result.samples_due == 100
    assert not [note.text for note in run.of(Note) if "without batches" in note.text]


@pytest.mark.parametrize("by", WRAPPERS)
def test_every_sample_of_a_wrapped_loader_is_used_once_where_workers_go_their_own_pace(
    lab: Lab, by: str
) -> None:
    run = lab.trained("wrapped.py", "--by", by, workers=2, protocol="asp")
    assert run.used() == once(2, 50)


@pytest.mark.parametrize("by", WRAPPERS)
@pytest.mark.parametrize("protocol", ["asp", "allreduce"])
def test_a_loader_that_takes_over_the_sampler_of_the_prepared_one_is_refused_with_the_right_order(
    lab: Lab, by: str, protocol: str
) -> None:
    run = lab.run("wrapped.py", "--by", by, "--late", workers=2, protocol=protocol)
    assert run.end.user_mistake
    assert "call pace.prepare last" in run.end.detail


def test_a_library_that_dies_of_what_is_not_set_is_told_how_not_to_see_the_rest(lab: Lab) -> None:
    script = lab.script(
        "import paceline\npaceline.join()\nimport torch\ntorch.distributed.init_process_group('gloo')\n"
    )
    run = lab.run(script, workers=2)
    assert "paceline.join(environment=False)" in run.result.failures[0].detail
