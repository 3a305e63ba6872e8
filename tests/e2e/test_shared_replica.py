"""All-reduce over shared memory: one model, stepped once for all, and nobody can tell the difference."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.trace.events import Note
from support.runs import Lab, Run
from support.tensors import assert_close, assert_equal

HEAD = (
    "import time, torch, paceline\n"
    "from torch.utils.data import DataLoader, TensorDataset\n"
    "pace = paceline.join()\n"
    "torch.manual_seed(1)\n"
    "from torch import nn\n"
    "model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()\n"
    "data = torch.randn(40, 3, dtype=torch.float64)\n"
    "loader = DataLoader(TensorDataset(data), batch_size=4)\n"
)
PREPARE = "model, optimizer, loader = pace.prepare(model, optimizer, loader)\n"
LOOP = (
    "for _ in pace.epochs(2):\n"
    "    for step, (x,) in enumerate(loader):\n"
    "        model(x).square().mean().backward()\n"
    "        optimizer.step()\n"
)
MOMENTUM = "optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)\n" + PREPARE
CLEAR = "        optimizer.zero_grad()\n"


def both(lab: Lab, text: str, **dials: Any) -> tuple[Run, Run]:
    """The same script with one model for all, and with replicas."""
    script = lab.script(HEAD + text)
    told: dict[str, Any] = {"workers": 3, "protocol": "allreduce"} | dials
    return lab.trained(script, **told), lab.trained(script, **told, private_weights=True)


@pytest.mark.parametrize(
    "clearing",
    [
        CLEAR,
        "",
        "        model.zero_grad()\n",
        "        optimizer.zero_grad(set_to_none=False)\n",
        "        optimizer.zero_grad() if step < 2 else None\n",
    ],
    ids=["cleared", "never cleared", "cleared by the model", "set to zero", "only at first"],
)
def test_one_model_arrives_where_replicas_do_however_gradients_are_cleared(lab: Lab, clearing: str) -> None:
    """Only who clears after some steps and not after others is told that it may not be so."""
    one, replicas = both(lab, MOMENTUM + LOOP + clearing)
    warned = "has not cleared its gradients" in str(one.of(Note))
    assert warned == ("if step" in clearing)
    assert "has not cleared" not in str(replicas.of(Note))
    if not warned:
        assert_close(one.weights, replicas.weights, 1e-12)


@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop", "Adadelta", "NAdam", "Rprop"])
def test_every_optimizer_of_torch_steps_for_all_as_it_would_for_each(lab: Lab, optimizer: str) -> None:
    made = f"optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.01)\n" + PREPARE
    one, replicas = both(lab, made + LOOP + CLEAR, clip_norm=0.1)
    assert_close(one.weights, replicas.weights, 1e-9)


def test_a_schedule_of_the_learning_rate_reaches_the_step(lab: Lab) -> None:
    scheduled = MOMENTUM.replace(
        PREPARE,
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)\n"
        "model, optimizer, loader, _ = pace.prepare(model, optimizer, loader, scheduler)\n",
    )
    one, replicas = both(lab, scheduled + LOOP + CLEAR + "        scheduler.step()\n")
    plain = lab.trained(lab.script(HEAD + MOMENTUM + LOOP + CLEAR), workers=3, protocol="allreduce")
    assert_close(one.weights, replicas.weights, 1e-12)
    with pytest.raises(AssertionError):
        assert_close(one.weights, plain.weights, 1e-6)


OWN = (
    "class Own(torch.optim.SGD):\n"
    "    def step(self, closure=None):\n"
    "        self.param_groups[0]['lr'] *= 0.9\n"
    "        return super().step(closure)\n"
    "optimizer = Own(model.parameters(), lr=0.1)\n"
)
HOOKED = (
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "def decay(optimizer, *told):\n"
    "    optimizer.param_groups[0]['lr'] *= 0.9\n"
    "optimizer.register_step_pre_hook(decay)\n"
)


@pytest.mark.parametrize("optimizer", [OWN, HOOKED], ids=["another class", "a hook"])
def test_an_optimizer_that_only_its_worker_can_step_keeps_replicas(lab: Lab, optimizer: str) -> None:
    one, replicas = both(lab, optimizer + PREPARE + LOOP + CLEAR)
    assert_equal(one.weights, replicas.weights)


def test_whoever_leaves_has_the_saved_weights_for_itself_once_all_have_ended(lab: Lab) -> None:
    early = (
        "        if pace.rank == 1 and step == 1:\n"
        "            pace.leave()\n"
        "            print('left with', float(model[0].weight.sum()), flush=True)\n"
        "            model[0].weight.data.zero_()\n"
        "            raise SystemExit\n"
    )
    run = lab.trained(lab.script(HEAD + MOMENTUM + LOOP + CLEAR + early), workers=3, protocol="allreduce")
    assert run.ended.statuses == {0: 0, 1: 0, 2: 0}, run.logs()
    assert bool(run.weights["0.weight"].any())
    assert f"left with {float(run.weights['0.weight'].sum())}" in run.log("rank1")


def test_a_saved_optimizer_state_is_complete_wherever_steps_are_taken(lab: Lab) -> None:
    told = "        print('moved', len(optimizer.state_dict()['state']), flush=True)\n"
    for run in both(lab, MOMENTUM + LOOP + CLEAR + told):
        assert "moved 6" in run.log()


def test_evaluation_and_consensus_see_the_one_model(lab: Lab) -> None:
    asked = (
        "    pace.evaluate(lambda m: {'accuracy': float(m[0].weight.sum())})\n"
        "    print('apart', pace.consensus(), flush=True)\n"
    )
    one, replicas = both(lab, MOMENTUM + LOOP + CLEAR + asked)
    assert one.logs().count("apart 0.0") == 6
    assert one.result.accuracy == pytest.approx(replicas.result.accuracy, abs=1e-12)
    assert_close(one.weights, replicas.weights, 1e-12)
