"""What a script saves, loads and resets of its optimizer's state, wherever steps are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.trace.events import Note
from support.runs import Lab

HEAD = """
import collections, copy, sys, torch, paceline

pace = paceline.join()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Linear(2, 1, bias=False)
kind = {"sgd": (torch.optim.SGD, {"momentum": 0.5}), "adamw": (torch.optim.AdamW, {"weight_decay": 0.0})}
cls, settings = kind[sys.argv[1]]
optimizer = cls(model.parameters(), lr=0.1, **settings)

def train(factor):  # two steps of each, with everybody there from the first to the last
    pace.gather(1)
    for _ in range(2):
        optimizer.zero_grad()
        (factor * model(torch.ones(4, 2)).mean()).backward()
        optimizer.step()
    pace.gather(1)

def weights():
    return next(iter(model.parameters())).detach().clone()
"""
DIALS = [
    {"protocol": "bsp"},
    {"protocol": "asp", "correct": "auto"},
    {"protocol": "asp", "correct": "none"},
    {"protocol": "allreduce"},
]
STALE = [pytest.param({"protocol": "asp", "correct": "auto"}, kind, id=kind) for kind in ("sgd", "adamw")]


def trained(lab: Lab, text: str, kind: str, **dials: Any) -> Any:
    return lab.trained(lab.script(HEAD + text), kind, **{"workers": 2} | dials)


@pytest.mark.parametrize(("dials", "kind"), STALE)
def test_plain_pytorch_goes_on_from_what_a_corrected_run_saves(
    lab: Lab, dials: dict[str, Any], kind: str
) -> None:
    saves = """
model, optimizer = pace.prepare(model, optimizer)
train(1.0)
other = torch.nn.Linear(2, 1, bias=False)
plain = cls(other.parameters(), lr=0.1, **settings)
plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
state = plain.state[other.weight]
names = ["momentum_buffer"] if sys.argv[1] == "sgd" else ["exp_avg", "exp_avg_sq", "step"]
assert sorted(state) == names, state
assert all(bool((state[name] > 0).all()) for name in names), state
other(torch.ones(1, 2)).sum().backward()
plain.step()
"""
    trained(lab, saves, kind, **dials)


MOVES = """
if sys.argv[2] == "before":
    optimizer.load_state_dict(state)
model, optimizer = pace.prepare(model, optimizer)
if sys.argv[2] == "after":
    optimizer.load_state_dict(state)
train(0.0)
"""


@pytest.mark.parametrize("dials", DIALS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_momentum_that_a_script_loads_moves_the_weights(lab: Lab, when: str, dials: dict[str, Any]) -> None:
    """No gradient does: in lockstep they move as far as one process does in two steps."""
    text = "state = optimizer.state_dict() | {'state': {0: {'momentum_buffer': torch.ones(1, 2)}}}" + MOVES
    script = lab.script(HEAD + text)
    began = lab.trained(script, "sgd", "never", workers=2, **dials).weights["weight"]
    moved = lab.trained(script, "sgd", when, workers=2, **dials).weights["weight"] - began
    far = moved.flatten().tolist()
    if dials["protocol"] == "asp":  # how far depends on who is there
        assert all(-0.15 < each < -0.04 for each in far)
    else:
        assert far == pytest.approx([-0.1 * (0.5 + 0.25)] * 2)


def test_pace_load_brings_back_what_a_corrected_run_has_saved(lab: Lab, tmp_path: Path) -> None:
    text = f"""
if sys.argv[2] == "load":
    pace.load({str(tmp_path / "kept")!r})
model, optimizer = pace.prepare(model, optimizer)
if sys.argv[2] == "save":
    train(1.0)
    pace.save({str(tmp_path / "kept")!r})
    torch.save(weights(), {str(tmp_path / "was")!r} if pace.lead else "/dev/null")
else:
    was = weights()
    train(0.0)
    assert bool((weights() < was - 0.01).all()), (was, weights())
"""
    script = lab.script(HEAD + text)
    for what in ("save", "load"):
        lab.trained(script, "sgd", what, workers=2, protocol="asp", correct="auto")


RESETS = {
    "loaded": "optimizer.load_state_dict(fresh)",
    "cleared": "optimizer.state.clear()",
    "replaced": "optimizer.state = collections.defaultdict(dict)",
}


@pytest.mark.parametrize("dials", DIALS)
@pytest.mark.parametrize("how", sorted(RESETS))
def test_a_reset_forgets_the_momentum(lab: Lab, how: str, dials: dict[str, Any]) -> None:
    text = f"""
fresh = copy.deepcopy(optimizer.state_dict())
model, optimizer = pace.prepare(model, optimizer)
train(1.0)
{RESETS[how]}
train(0.0)  # the first step may still be taken on a look-ahead; none of these moves the store's weights
pace.leave()
state = optimizer.state_dict()["state"]
assert all(not bool(each["momentum_buffer"].any()) for each in state.values()), state
"""
    trained(lab, text, "sgd", **dials)


@pytest.mark.parametrize("dials", DIALS[:2])
def test_what_a_script_writes_into_the_state_by_itself_is_refused(lab: Lab, dials: dict[str, Any]) -> None:
    text = """
model, optimizer = pace.prepare(model, optimizer)
train(1.0)
optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(1, 2)
train(1.0)
"""
    run = lab.run(lab.script(HEAD + text), "sgd", workers=2, **dials)
    assert run.result.status == "failed"
    assert "optimizer.load_state_dict()" in run.end.detail


def test_a_state_that_is_loaded_in_the_middle_of_a_resumed_run_counts(lab: Lab) -> None:
    """One that is loaded before its first step gives way to the checkpoint, which a note says."""
    text = """
pace_loads = copy.deepcopy(optimizer.state_dict())
model, optimizer = pace.prepare(model, optimizer)
optimizer.load_state_dict(pace_loads)
train(1.0)
if sys.argv[2] == "stop":
    pace.gather(1)
    raise ValueError("stopped here")
state = optimizer.state_dict()["state"]
assert bool((state[0]["momentum_buffer"] > 1.6).all()), state  # two steps from nothing give 1.5
optimizer.load_state_dict(pace_loads)
train(0.0)
pace.leave()
state = optimizer.state_dict()["state"]
assert not bool(state[0]["momentum_buffer"].any()), state
"""
    script = lab.script(HEAD + text)
    first = lab.run(script, "sgd", "stop", workers=2, protocol="bsp")
    assert "stopped here" in first.logs()
    second = lab.trained(
        script, "sgd", "go on", workers=2, protocol="bsp", resume=str(first.folder / "checkpoint")
    )
    notes = [note.text for note in second.of(Note)]
    assert any("that of the checkpoint stays" in text for text in notes), notes
