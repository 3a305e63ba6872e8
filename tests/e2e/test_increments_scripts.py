"""`--apply increments` with what scripts do besides, and with workers on another host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from e2e.scripts.cases import CASES
from e2e.test_increments import (
    ALONE,
    EPOCHS,
    SAMPLES,
    SIZES,
    all_gradients,
    beginning,
    plain_pytorch,
    virtual,
)
from paceline.engines.local import LocalEngine
from paceline.trace.events import Evaluated, Note
from support.hosts import Apart
from support.runs import SCRIPTS, Lab, once
from support.tensors import assert_close, assert_equal, assert_finite, threads

LOOPS = Path(__file__).parent.parent / "scripts"
SSP = {"protocol": "ssp", "apply": "increments"}


@pytest.fixture(scope="module")
def elsewhere(warm_lab: Lab) -> Iterator[LocalEngine]:
    """The second host's engine."""
    engine = LocalEngine()
    warm_lab.further.add(engine._process.pid)
    yield engine
    warm_lab.further.discard(engine._process.pid)
    engine.close()


def alone(script: Path, *args: object) -> None:
    """Run a script without Paceline's workers."""
    subprocess.run([sys.executable, script, *map(str, args)], check=True, timeout=60)


@pytest.mark.parametrize("here", [0, 1])
def test_no_increment_is_lost_between_hosts(lab: Lab, elsewhere: LocalEngine, here: int) -> None:
    apart = Apart(lab, elsewhere, "train.py", "exact", *SIZES, here=here, workers=3, **SSP)
    apart.host(3 - here)
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert torch.equal(run.weights["w"], beginning() - all_gradients())
    assert run.used() == once(EPOCHS, SAMPLES)
    assert any("has no optimizer state" in note.text for note in run.of(Note))


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_one_worker_on_another_host_equals_plain_pytorch_bit_for_bit(
    lab: Lab, elsewhere: LocalEngine, name: str
) -> None:
    apart = Apart(lab, elsewhere, "train.py", name, *SIZES, here=0, workers=1, **SSP)
    apart.host(1)
    run = apart.finish()
    with threads(1):
        assert_equal(run.weights, plain_pytorch(CASES[name]))


@pytest.mark.parametrize("way", ["", "--joint"])
def test_every_one_of_several_optimizers_steps_by_itself(lab: Lab, tmp_path: Path, way: str) -> None:
    """With a prepared schedule, and a model that no optimizer trains."""
    flags = [way] if way else []
    alone(LOOPS / "gan.py", "--save", tmp_path / "plain", *flags)
    run = lab.trained(LOOPS / "gan.py", *flags, **SSP, **virtual(1))
    assert_equal(run.weights, load_file(tmp_path / "plain.0"))


def test_a_clipped_step_is_the_worker_s_own_as_torch_would_clip_it(lab: Lab, tmp_path: Path) -> None:
    alone(LOOPS / "clip_loop.py", "--own", "--save", tmp_path / "plain")
    run = lab.trained(LOOPS / "clip_loop.py", **ALONE)
    assert_equal(run.weights, load_file(tmp_path / "plain"))


def test_the_command_s_clip_norm_is_the_worker_s_own_too(lab: Lab, tmp_path: Path) -> None:
    alone(LOOPS / "clip_loop.py", "--own", "--save", tmp_path / "plain")
    text = (LOOPS / "clip_loop.py").read_text().replace("pace.clip_grad_norm_(NORM)", "pass")
    run = lab.trained(lab.script(text), clip_norm=0.05, **ALONE)
    assert_equal(run.weights, load_file(tmp_path / "plain"))


def test_an_overflow_under_a_scaler_is_left_out_and_the_momentum_stays_sound(
    lab: Lab, tmp_path: Path
) -> None:
    for folder in ("plain", "ours"):
        (tmp_path / folder).mkdir()
    alone(LOOPS / "amp_loop.py", tmp_path / "plain")
    run = lab.trained(LOOPS / "amp_loop.py", tmp_path / "ours", **ALONE)
    assert_close(run.weights, load_file(tmp_path / "plain" / "rank0.safetensors"), 1e-6)
    scales = [json.loads((tmp_path / folder / "rank0.json").read_text()) for folder in ("plain", "ours")]
    assert scales[0] == scales[1]


def test_a_gradient_that_is_not_finite_ends_the_run_and_is_named(lab: Lab) -> None:
    run = lab.run("peers.py", "momentum", "--bad", 1, workers=3, **SSP)
    assert run.result.status == "failed"
    assert "rank 1" in run.end.detail
    assert "NaN or infinity in '0.weight'" in run.end.detail


def test_or_is_skipped_and_leaves_the_worker_s_momentum_alone(lab: Lab) -> None:
    run = lab.trained("peers.py", "momentum", "--bad", 1, workers=3, bad_gradient="skip", **SSP)
    assert_finite(run.weights)
    assert [push.pushed for push in run.pushes if push.fate == "skip"] == [1]


SAVES = """
import sys
sys.path.insert(0, {scripts!r})
import torch
from cases import CASES
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join()
found = pace.load({folder!r}) if {load} else {{}}
case = CASES["adamw"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(48)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(1):
    for x, y in loader:
        case.iteration(model, optimizer, x, y)
pace.evaluate(lambda model: {{"total": sum(p.sum().item() for p in model.parameters())}})
if not {load}:
    pace.save({folder!r})
assert len(optimizer.state_dict()["state"]) == 4
"""


def test_what_a_script_saves_has_the_lead_s_own_optimizer(lab: Lab, tmp_path: Path) -> None:
    """One worker: saved, loaded and trained on it is as one process that trains on."""
    written = [
        lab.script(SAVES.format(scripts=str(SCRIPTS), folder=str(tmp_path / "saved"), load=load))
        for load in (False, True)
    ]
    for script in written:
        run = lab.trained(script, **ALONE)
        assert run.of(Evaluated)[-1].values["total"] == pytest.approx(
            sum(float(tensor.sum()) for tensor in run.weights.values()), rel=1e-12
        )
    model, optimizer = CASES["adamw"].build()
    x, y = CASES["adamw"].samples(48)
    with threads(1):
        for _ in range(2):
            for start in range(0, 48, 4):
                CASES["adamw"].iteration(model, optimizer, x[start : start + 4], y[start : start + 4])
    assert_equal(run.weights, model.state_dict())


WRITES = """
import sys
sys.path.insert(0, {scripts!r})
import torch
from cases import CASES
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join()
case = CASES["exact"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(48)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(1):
    for number, (x, y) in enumerate(loader):
        if pace.rank == 0 and number == 1:
            with torch.no_grad():
                model.w += 1000
        case.iteration(model, optimizer, x, y)
"""


def test_what_a_script_writes_into_parameters_is_refused_as_no_part_of_its_step(lab: Lab) -> None:
    run = lab.run(lab.script(WRITES.format(scripts=str(SCRIPTS))), workers=2, **SSP)
    assert run.result.status == "failed"
    assert "rank 0 wrote to 'w'" in run.end.detail
    assert "pace.after_step(fn)" in run.end.detail


def test_a_script_that_never_clears_its_gradients_adds_to_its_own(lab: Lab) -> None:
    """What lies in the segment is not a gradient; the worker's own is elsewhere."""
    text = WRITES.replace("pace.rank == 0 and", "False and").replace(
        "case.iteration(model, optimizer, x, y)", "model(x).sum().backward(); optimizer.step()"
    )
    run = lab.trained(lab.script(text.format(scripts=str(SCRIPTS))), **ALONE)
    x, _ = CASES["exact"].samples(48)
    sums = x.view(-1, 4, 5).sum(1).cumsum(0).sum(0)
    assert torch.equal(run.weights["w"], beginning() - sums)
