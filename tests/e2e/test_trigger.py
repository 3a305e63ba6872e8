"""Event-triggered pushes: what is kept back is pushed later, whole, and every sample counts once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from e2e.scripts.cases import CASES
from paceline.sim.request import ClusterRequest
from paceline.trace.events import Decided, Evaluated, Reported, WorkEnded
from support.reference_dana import Retold
from support.runs import SCRIPTS, Lab, Run, once, wait_until
from support.tensors import assert_equal

SAMPLES, BATCH, EPOCHS, WORKERS = 120, 4, 2, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
NEVER = 1e9
"""A share that no gradient comes to."""
ALWAYS = 1e-9
"""One that every gradient comes to."""
SOME = 1.1
REAL: dict[str, Any] = {"device_time_s": 0.002, "jitter": 0.5, "slow": {2: 3.0}}
CLUSTER = msgspec.to_builtins(
    ClusterRequest(workers=WORKERS, slow={2: 2.5}, compute_s=0.1, jitter=0.3, batch=BATCH), str_keys=True
)
EXACT: dict[str, Any] = {"workers": WORKERS, "weighting": "sum"}
"""With the case `exact` the weights tell which samples they were trained on."""


def trained_on(run: Run, before: Tensor | None = None) -> Tensor:
    """The sum of all samples whose gradients are in the weights."""
    model, _ = CASES["exact"].build()
    return (model.state_dict()["w"] if before is None else before) - run.weights["w"]


def all_of(samples: int, epochs: int) -> Tensor:
    return epochs * CASES["exact"].samples(samples)[0].sum(0)


@pytest.mark.parametrize("protocol", ["asp", "dssp", "hybrid_sgd"])
@pytest.mark.parametrize("dials", [{"trigger": ALWAYS}, {"trigger": NEVER, "trigger_most": 1}])
def test_where_every_gradient_is_pushed_the_bits_are_those_of_a_run_without_trigger(
    lab: Lab, protocol: str, dials: dict[str, Any]
) -> None:
    common = {"workers": WORKERS, "protocol": protocol, "cluster": CLUSTER, "correct": "dana"}
    plain = lab.trained("train.py", "momentum", *SIZES, **common)
    run = lab.trained("train.py", "momentum", *SIZES, **common, **dials)
    assert_equal(run.weights, plain.weights)
    assert [e.pushed for e in run.pushes] == [e.pushed for e in plain.pushes]
    assert run.result.trigger is not None
    assert run.result.trigger.pushed == 1.0
    assert plain.result.trigger is None


ACCUMULATES = """
import sys
sys.path.insert(0, {scripts!r})
import torch.nn.functional as F
from cases import CASES
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join("asp")
case = CASES[{case!r}]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples({samples})), batch_size={batch})
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    for number, (x, y) in enumerate(loader, 1):
        F.cross_entropy(model(x), y).backward()
        if number % {every} == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize("case", ["sgd", "momentum", "adamw"])
def test_where_nothing_triggers_a_run_equals_a_script_that_accumulates(lab: Lab, case: str) -> None:
    """Two equal workers take turns, and every pass has whole sums for both: the order is the same."""
    cluster = msgspec.to_builtins(ClusterRequest(workers=2, compute_s=0.1, batch=BATCH), str_keys=True)
    common: dict[str, Any] = {"workers": 2, "protocol": "asp", "cluster": cluster}
    named = {"scripts": str(SCRIPTS), "case": case, "samples": 96, "batch": BATCH}
    by_hand = lab.trained(lab.script(ACCUMULATES.format(every=3, **named)), **common)
    plain = lab.script(ACCUMULATES.format(every=1, **named))
    run = lab.trained(plain, **common, trigger=NEVER, trigger_most=3)
    assert [e.work for e in run.pushes] == [e.work for e in by_hand.pushes]
    assert [e.samples for e in run.pushes] == [e.samples for e in by_hand.pushes] == [12] * 16
    assert [e.lr_scale for e in run.pushes] == [e.lr_scale for e in by_hand.pushes]
    for name, value in by_hand.weights.items():
        torch.testing.assert_close(run.weights[name], value, rtol=1e-12, atol=1e-12)
    assert run.result.trigger is not None
    assert (run.result.trigger.pushed, run.result.trigger.triggered) == (pytest.approx(1 / 3), 0)
    assert run.result.seconds == pytest.approx(3 * by_hand.result.seconds)


class SummedUp(Retold):
    """Gradients of several batches, each a mean, that were added up."""

    def gradient(self, at: Tensor, positions: Iterable[int]) -> Tensor:
        places = list(positions)
        batches = [places[first : first + BATCH] for first in range(0, len(places), BATCH)]
        return torch.stack([super(SummedUp, self).gradient(at, each) for each in batches]).sum(0)


@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize("protocol", ["asp", "ssp"])
def test_a_run_is_what_its_trace_says(lab: Lab, protocol: str, simulated: bool) -> None:
    more = {"cluster": CLUSTER} if simulated else REAL
    dials = {"workers": WORKERS, "protocol": protocol, "correct": "dana", "trigger": SOME}
    run = lab.trained("train.py", "momentum", *SIZES, **dials, **more)
    told = run.result.trigger
    assert told is not None
    assert told.steps == EPOCHS * SAMPLES // BATCH == sum(e.withheld + 1 for e in run.pushes)
    assert told.pushed == len(run.pushes) / told.steps < 1
    assert 0 < told.triggered == sum(not e.forced for e in run.pushes) <= len(run.pushes)
    assert all(len(e.work) == e.withheld + 1 <= 8 for e in run.pushes)
    again = SummedUp(CASES["momentum"], SAMPLES)
    again.tell(run.trace)
    model, _ = CASES["momentum"].build()
    weights = torch.cat([run.weights[name].flatten() for name, _ in model.named_parameters()])
    torch.testing.assert_close(weights, again.dana.weights, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("share", [SOME, NEVER])
@pytest.mark.parametrize("kind", ["plain", "processes", "stream", "batches", "dictionary"])
def test_nothing_is_lost_whatever_the_loader(lab: Lab, kind: str, share: float) -> None:
    """The script clears its gradients after every step, also after one that was kept back."""
    run = lab.trained("loaders.py", kind, **EXACT, protocol="asp", trigger=share, trigger_most=4)
    assert torch.equal(trained_on(run), all_of(60, 3))
    assert run.result.samples == 3 * 60
    assert run.result.trigger is not None
    assert run.result.trigger.pushed < 1
    assert all(len({epoch for epoch, _, _ in e.work}) <= 1 for e in run.pushes), "a pass ends with a push"
    if kind == "stream" and share == NEVER:  # five batches each per pass
        kept = [[e.withheld for e in run.pushes if e.pushed == rank] for rank in range(WORKERS)]
        assert kept == [[3, 0] * 3] * WORKERS


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [
        ("psp", {}),
        ("hybrid_sgd", {"threshold": "constant", "first": 3, "wait": "never", "lr_scale": "K"}),
        ("bounded_ps", {"buffered": True}),
    ],
)
def test_an_epoch_moves_the_weights_as_far_where_gradients_are_held(
    lab: Lab, protocol: str, settings: dict[str, Any]
) -> None:
    """In a mean of sums each counts as one, however many gradients it is of."""
    dials = EXACT | {"protocol": protocol, "settings": settings, "trigger": SOME, "cluster": CLUSTER}
    run = lab.trained("train.py", "exact", *SIZES, **dials)
    assert run.used() == once(EPOCHS, SAMPLES)
    torch.testing.assert_close(trained_on(run), all_of(SAMPLES, EPOCHS))
    assert len({e.withheld for e in run.pushes}) > 1


@pytest.mark.parametrize(
    "case", ["zero_first", "zero_between", "zero_kept", "model_zero", "closure", "frozen"]
)
def test_a_script_may_clear_its_gradients_as_it_likes(lab: Lab, case: str) -> None:
    """Some parameters have a gradient in some batches only; a sum has them if one of its batches has."""
    common: dict[str, Any] = {
        "workers": 2,
        "protocol": "asp",
        "cluster": {**CLUSTER, "workers": 2, "slow": {}},
    }
    runs = [
        lab.trained("train.py", each, *SIZES, **common, trigger=NEVER, trigger_most=3)
        for each in (case, "zero_kept" if case.startswith(("zero", "model")) else case)
    ]
    for name, value in runs[1].weights.items():
        torch.testing.assert_close(runs[0].weights[name], value, rtol=1e-12, atol=1e-12)
    assert runs[0].used() == once(EPOCHS, SAMPLES)


def test_what_a_dead_worker_kept_back_is_dispensed_again(lab: Lab) -> None:
    """All wait before their third iteration, each with two gradients that it has not pushed."""
    pause = ("--pause", lab.root / "go on", "--before", 3)
    dials = EXACT | {"protocol": "asp", "trigger": NEVER}
    running = lab.start("train.py", "exact", *SIZES, *pause, **dials)
    lab.until_paused(WORKERS)
    running.kill(1)
    (lab.root / "go on").touch()
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    assert run.died == {1}
    assert not [e for e in run.pushes if e.pushed == 1]
    assert run.used() == once(EPOCHS, SAMPLES)
    assert torch.equal(trained_on(run), all_of(SAMPLES, EPOCHS))


def steps_by_rank(pushes: list[Decided]) -> dict[int | None, int]:
    steps: Counter[int | None] = Counter()
    for push in pushes:
        steps[push.pushed] += push.withheld + 1
    return dict(steps)


def test_a_run_that_is_stopped_and_resumed_loses_no_sample(lab: Lab) -> None:
    """Twice: what checkpoints keep of the trigger goes on from one to the next."""
    args, before = ("train.py", "exact", *SIZES), None
    used, pushes = Counter[tuple[int, int]](), list[Decided]()
    dials = EXACT | {"protocol": "asp", "trigger": NEVER, "trigger_most": 5}
    for number in range(2):
        file = lab.root / f"go on{number}"
        running = lab.start(*args, "--pause", file, "--before", 3, resume=before, **dials)
        wait_until(lambda name=file.name: len(list(lab.root.glob(f"{name}.*"))) == WORKERS, "all wait")  # type: ignore[misc]
        running.stop()
        file.touch()
        run = lab.finish(running)
        assert run.result.status == "stopped", run.end.detail
        before, used = str(run.folder / "checkpoint"), used + run.used()
        pushes += run.pushes
        kept = msgspec.json.decode((run.folder / "checkpoint" / "state.json").read_bytes())
        seen = {int(rank): state["norms"][0] for rank, state in kept["workers"].items()}
        # a step whose gradient the stop came before was seen, and is made again
        assert all(seen[rank] >= steps for rank, steps in steps_by_rank(pushes).items() if rank is not None)
        assert kept["withheld"] == sum(e.withheld for e in pushes) > 0
    last = lab.trained(*args, resume=before, **dials)
    assert used + last.used() == once(EPOCHS, SAMPLES)
    assert torch.equal(trained_on(last), all_of(SAMPLES, EPOCHS))


def test_a_checkpoint_taken_meanwhile_has_what_was_pushed_and_no_more(lab: Lab) -> None:
    """Everything is killed while all wait, each with gradients that it has not pushed."""
    args = ("train.py", "exact", *SIZES)
    dials = EXACT | {"protocol": "asp", "trigger": NEVER, "trigger_most": 3}
    pause = ("--pause", lab.root / "go on", "--before", 9)
    running = lab.start(*args, *pause, checkpoint_every="2", **dials)
    lab.until_paused(WORKERS)
    wait_until(lambda: (running.config.path / "checkpoint").exists(), "a checkpoint is on the disk")
    os.kill(running.store_pid, signal.SIGKILL)
    (lab.root / "go on").touch()
    first = lab.finish(running)
    second = lab.trained(*args, resume=str(first.folder / "checkpoint"), **dials)
    assert torch.equal(trained_on(second), all_of(SAMPLES, EPOCHS))


ENDS = """
import sys
sys.path.insert(0, {scripts!r})
from cases import CASES
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join("asp", trigger={share})
case = CASES["exact"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(120)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
seen = 0
for epoch in pace.epochs(2):
    for x, y in loader:
        case.iteration(model, optimizer, x, y)
        seen += len(x)
        {inside}
    {after}
print("seen", seen)
"""


def ending(lab: Lab, inside: str = "pass", after: str = "pass", share: float = NEVER, **dials: Any) -> Run:
    text = ENDS.format(scripts=str(SCRIPTS), share=share, inside=inside, after=after)
    return lab.trained(lab.script(text), **EXACT, cluster=CLUSTER, **dials)


def seen(run: Run) -> list[int]:
    return [int(run.log(f"rank{rank}").split("seen ")[1].split()[0]) for rank in range(WORKERS)]


@pytest.mark.parametrize(
    "inside",
    [
        "if pace.lead and seen >= 12: pace.stop('enough')",
        "if seen >= 12 * (1 + pace.rank): break",
        "if seen >= 12 * (1 + pace.rank): pace.leave(); break",
    ],
)
def test_what_was_computed_is_pushed_before_a_worker_stops_or_leaves(lab: Lab, inside: str) -> None:
    run = ending(lab, inside, "break" if "break" in inside else "pass")
    pushed: Counter[int] = Counter()
    for push in run.pushes:
        pushed[push.pushed or 0] += push.samples
    assert [pushed[rank] for rank in range(WORKERS)] == seen(run)
    assert run.result.trigger is not None, "the script's own share counts"


def test_what_a_worker_has_computed_is_pushed_before_it_ends_the_run(lab: Lab) -> None:
    run = ending(lab, "if pace.lead and seen == 12: pace.stop('enough')")
    ended = next(number for number, event in enumerate(run.trace) if isinstance(event, WorkEnded))
    before = [e for e in run.trace[:ended] if isinstance(e, Decided) and e.pushed == 0]
    assert [e.samples for e in before] == [12]


OWN_SUMS = """
import sys
sys.path.insert(0, {scripts!r})
from cases import CASES
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join("asp", trigger=1e9)
case = CASES["exact"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(120)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    for number, (x, y) in enumerate(loader, 1):
        model(x).sum().backward()
        if {steps}:
            optimizer.step()
            {clears}
        {looks}
"""


def test_a_push_between_two_backward_passes_leaves_the_scripts_own_sum_alone(lab: Lab) -> None:
    """Its optimizer steps after every second batch, and the lead evaluates in between."""
    named = {
        "scripts": str(SCRIPTS),
        "steps": "number % 2 == 0",
        "clears": "optimizer.zero_grad()",
        "looks": "if number % 5 == 0: pace.evaluate(lambda: 0.0)",
    }
    cluster = msgspec.to_builtins(ClusterRequest(workers=3, compute_s=0.1, batch=BATCH), str_keys=True)
    run = lab.trained(lab.script(OWN_SUMS.format(**named)), **EXACT, cluster=cluster)
    assert run.of(Evaluated)
    assert run.used() == once(EPOCHS, SAMPLES)
    assert torch.equal(trained_on(run), all_of(SAMPLES, EPOCHS))


def test_a_script_that_never_clears_its_gradients_pushes_what_it_would_push_without(lab: Lab) -> None:
    named = {"scripts": str(SCRIPTS), "steps": "True", "clears": "", "looks": ""}
    run = lab.trained(lab.script(OWN_SUMS.format(**named)), **EXACT, cluster=CLUSTER)
    x, total, own = (
        CASES["exact"].samples(SAMPLES)[0],
        torch.zeros(5),
        dict.fromkeys(range(3), torch.zeros(5)),
    )
    for push in run.pushes:
        assert push.pushed is not None
        for _, first, count in push.work:
            own[push.pushed] = own[push.pushed] + x[first : first + count].sum(0)
            total = total + own[push.pushed]
    assert torch.equal(trained_on(run), total)
    assert any(push.withheld for push in run.pushes)


def test_an_evaluation_sees_all_that_its_worker_has_computed(lab: Lab) -> None:
    looks = "if seen % 12 == 0: pace.evaluate(lambda model: {'seen': seen, 'w': model.w[0].item()})"
    run = ending(lab, looks.replace("{", "{{").replace("}", "}}").format())
    own = total = 0
    for event in run.trace:
        if isinstance(event, Evaluated):
            assert event.values["seen"] == own
            assert event.values["w"] == CASES["exact"].build()[0].state_dict()["w"][0] - total
        elif event in run.pushes:
            own += event.samples if event.pushed == 0 else 0
            rows = [at for _, first, count in event.work for at in range(first, first + count)]
            total = total + CASES["exact"].samples(120)[0][rows].sum(0)[0]
    assert own > 12


def test_a_prepared_scheduler_counts_steps_and_not_pushes(lab: Lab) -> None:
    text = """
import sys
sys.path.insert(0, {scripts!r})
import torch
from cases import CASES
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join("asp")
case = CASES["sgd"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(120)), batch_size=4)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
for epoch in pace.epochs(2):
    for x, y in loader:
        case.iteration(model, optimizer, x, y)
        scheduler.step()
    pace.report(at=scheduler.last_epoch)
"""
    common: dict[str, Any] = {"workers": WORKERS, "protocol": "asp", "cluster": CLUSTER}
    script = lab.script(text.format(scripts=str(SCRIPTS)))
    ends = [
        [e.values["at"] for e in lab.trained(script, **common, **more).of(Reported) if "at" in e.values][-1]
        for more in ({}, {"trigger": NEVER, "trigger_most": 4})
    ]
    assert ends[0] == EPOCHS * SAMPLES // BATCH // WORKERS
    assert 0 <= ends[0] - ends[1] <= 4  # the last sum is pushed after the last `scheduler.step()`


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("scaler", "a GradScaler would scale differently"),
        ("clips", "with --trigger that may not be pushed"),
        ("several", "--trigger does not go with several optimizers"),
        ("bsp", "under 'bsp' all wait for every gradient"),
        ("local_sgd", "under 'local_sgd' workers average among themselves, and there is no store"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(lab: Lab, case: str, why: str) -> None:
    text = """
import torch, paceline
pace = paceline.join({protocol!r}, trigger=0.5)
models = [torch.nn.Linear(2, 1) for _ in range({models})]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
pace.prepare(*models, *optimizers)
scaler = torch.amp.GradScaler("cpu", enabled={scaler})
scaler.scale(models[0](torch.ones(1, 2)).sum()).backward()
if {clips}:
    pace.clip_grad_norm_(1.0)
scaler.step(optimizers[0])
"""
    protocol = case if case in ("bsp", "local_sgd") else "asp"
    named = {"models": 1 + (case == "several"), "scaler": case == "scaler", "clips": case == "clips"}
    run = lab.run(lab.script(text.format(protocol=protocol, **named)), workers=2)
    assert run.result.status == "failed"
    assert why in run.end.detail
