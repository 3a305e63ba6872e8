"""Corrected runs, real and simulated: each is what its trace makes of it by the rule written down naively."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from e2e.scripts.cases import CASES
from paceline.engines.local import LocalEngine
from paceline.sim.request import ClusterRequest
from paceline.trace import read_trace
from paceline.trace.events import Evaluated, Note, WorkerJoined, WorkerLeft
from support.hosts import Apart
from support.reference_dana import Retold
from support.runs import SCRIPTS, Lab, Run, wait_until
from support.shell import Shell
from support.spread import Spread
from support.tensors import assert_equal

SAMPLES, BATCH, EPOCHS, WORKERS = 120, 4, 2, 4
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
DIALS: dict[str, Any] = {"workers": WORKERS, "correct": "dana"}
REAL: dict[str, Any] = {"device_time_s": 0.002, "jitter": 0.5, "slow": {3: 3.0}}
HYBRID = {"threshold": "constant", "first": 3, "wait": "never"}
BUFFERED = {"buffered": True}
CLUSTER = msgspec.to_builtins(
    ClusterRequest(workers=WORKERS, slow={3: 2.5}, compute_s=0.1, jitter=0.3, batch=BATCH), str_keys=True
)


def flat(weights: dict[str, Tensor]) -> Tensor:
    model, _ = CASES["momentum"].build()
    return torch.cat([weights[name].flatten() for name, _ in model.named_parameters()])


def retold(run: Run) -> Retold:
    again = Retold(CASES["momentum"], SAMPLES)
    again.tell(run.trace)
    return again


def assert_is_dana(run: Run) -> None:
    torch.testing.assert_close(flat(run.weights), retold(run).dana.weights, rtol=1e-9, atol=1e-9)
    assert run.result.correct == "dana"


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [
        ("asp", {}),
        ("dssp", {}),
        ("hybrid_sgd", HYBRID),
        ("bounded_ps", {"buffered": True}),
        ("sync_switch", {}),
    ],
)
def test_an_exact_simulation_is_what_danas_rule_makes_of_its_trace(
    lab: Lab, protocol: str, settings: dict[str, Any]
) -> None:
    """Whose gradients were computed where, in which order, with what held: flushes are corrected too."""
    dials = DIALS | {"protocol": protocol, "settings": settings, "cluster": CLUSTER}
    assert_is_dana(lab.trained("train.py", "momentum", *SIZES, **dials))


@pytest.mark.parametrize("protocol", ["asp", "ssp"])
def test_a_real_run_is_what_danas_rule_makes_of_its_trace(lab: Lab, protocol: str) -> None:
    assert_is_dana(lab.trained("train.py", "momentum", *SIZES, protocol=protocol, **DIALS, **REAL))


def test_a_worker_that_dies_takes_its_momentum_along(lab: Lab) -> None:
    pause = ("--pause", lab.root / "go on", "--before", 3)
    running = lab.start("train.py", "momentum", *SIZES, *pause, protocol="asp", **DIALS, **REAL)
    lab.until_paused(WORKERS)
    running.kill(1)
    (lab.root / "go on").touch()
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    assert run.died == {1}
    assert_is_dana(run)


def test_a_run_goes_on_with_every_workers_momentum(lab: Lab) -> None:
    args = ("train.py", "momentum", *SIZES)
    pause = ("--pause", lab.root / "go on", "--before", 6)
    running = lab.start(*args, *pause, protocol="asp", **DIALS)
    lab.until_paused(WORKERS)
    running.stop()
    (lab.root / "go on").touch()
    first = lab.finish(running)
    assert first.result.status == "stopped", first.end.detail
    checkpoint = first.folder / "checkpoint"
    told = retold(first)
    saved = load_file(checkpoint / "optimizer.safetensors")
    for rank in range(WORKERS):
        own = torch.cat([saved[f"{number}.~{rank}"].flatten() for number in range(len(_names()))])
        torch.testing.assert_close(own, told.dana.own[rank], rtol=1e-9, atol=1e-9)
    second = lab.trained(*args, protocol="asp", resume=str(checkpoint), **DIALS)
    told.tell(second.trace)
    torch.testing.assert_close(flat(second.weights), told.dana.weights, rtol=1e-9, atol=1e-9)


def _names() -> list[str]:
    return [name for name, _ in CASES["momentum"].build()[0].named_parameters()]


EVALUATES = """
import sys
sys.path.insert(0, {scripts!r})
from cases import CASES
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join("asp", correct="dana")
case = CASES["momentum"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples({samples})), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    for number, (x, y) in enumerate(loader):
        case.iteration(model, optimizer, x, y)
        if number % 3 == 1:
            pace.evaluate(lambda model: {{"total": sum(p.sum().item() for p in model.parameters())}})
if pace.rank == 1:
    model.state_dict()
"""


@pytest.mark.parametrize("simulated", [True, False])
def test_an_evaluation_sees_the_stores_weights_and_never_the_look_ahead(lab: Lab, simulated: bool) -> None:
    """The script names the correction, since the command has nothing against it."""
    script = lab.script(EVALUATES.format(scripts=str(SCRIPTS), samples=SAMPLES))
    more = {"cluster": CLUSTER} if simulated else REAL
    run = lab.trained(script, workers=WORKERS, correct="auto", **more)
    told = retold(run)
    looks = run.of(Evaluated)
    assert len(looks) >= 2
    for look in looks:
        assert look.values["total"] == pytest.approx(told.seen[look.version], rel=1e-9), look
    assert_is_dana(run)
    assert any("a look-ahead of the store's weights" in note.text for note in run.of(Note))


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_without_momentum_dana_is_plain_to_the_bit(lab: Lab, name: str) -> None:
    dials = {"workers": WORKERS, "protocol": "asp", "cluster": CLUSTER}
    plain, corrected = (
        lab.trained("train.py", name, *SIZES, correct=how, **dials) for how in ("none", "dana")
    )
    if name == "sgd":
        assert_equal(corrected.weights, plain.weights)
        assert any("changes nothing" in note.text for note in corrected.of(Note))
    else:
        assert not torch.equal(flat(corrected.weights), flat(plain.weights))


def test_lockstep_ignores_a_correction_and_says_so(lab: Lab) -> None:
    dials = {"workers": 2, "protocol": "bsp"}
    plain, asked = (
        lab.trained("train.py", "momentum", *SIZES, correct=how, **dials) for how in ("none", "dana")
    )
    assert_equal(asked.weights, plain.weights)
    assert asked.result.correct == "none"
    assert any("--correct dana is ignored" in note.text for note in asked.of(Note))


def test_auto_says_what_it_has_chosen(lab: Lab) -> None:
    run = lab.trained("train.py", "adamw", *SIZES, workers=2, protocol="asp", correct="auto")
    assert run.result.correct == "dana"
    assert any(note.text.startswith("correcting stale momentum with DANA") for note in run.of(Note))


@pytest.fixture(scope="module")
def warm_others(warm_lab: Lab) -> Iterator[list[LocalEngine]]:
    """Engines of two other hosts."""
    engines = [LocalEngine(), LocalEngine()]
    warm_lab.further.update(engine._process.pid for engine in engines)
    yield engines
    for engine in engines:
        warm_lab.further.discard(engine._process.pid)
        engine.close()


@pytest.mark.long
def test_who_takes_the_place_of_a_dead_worker_begins_without_its_momentum(
    lab: Lab, warm_others: list[LocalEngine]
) -> None:
    """Two die in the middle, and two of another host come instead; everybody waits for a file meanwhile."""
    pause = ("--pause", lab.root / "go on", "--before", 4)
    args = ("train.py", "momentum", *SIZES, *pause)
    apart = Apart(lab, warm_others[0], *args, here=2, protocol="asp", **DIALS)
    apart.host(2)
    lab.until_paused(WORKERS)
    apart.kill_host()
    assert warm_others[0].wait(30) is not None
    wait_until(lambda: apart.running.events(WorkerLeft) == 2, "the loss is noticed")
    apart.host(2)
    wait_until(lambda: apart.running.events(WorkerJoined) == WORKERS + 2, "the others have come")
    (lab.root / "go on").touch()
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail
    assert_is_dana(run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("protocol", "settings", "correct", "store_hosts", "here"),
    [
        ("asp", {}, "dana", 3, 2),
        ("hybrid_sgd", HYBRID, "dana+gap", 3, 2),
        ("ssp", {}, "dana", 1, 0),
        ("bounded_ps", BUFFERED, "gap", 2, 2),
        ("asp", {}, "dca", 1, 2),
    ],
)
def test_a_corrected_run_on_several_hosts_is_replayed_on_one_to_the_same_bits(
    lab: Lab,
    shell: Shell,
    warm_others: list[LocalEngine],
    protocol: str,
    settings: dict[str, Any],
    correct: str,
    store_hosts: int,
    here: int,
) -> None:
    """Wherever portions of the weights lie, and whatever was sent there: evaluations are in between."""
    script = lab.script(EVALUATES.format(scripts=str(SCRIPTS), samples=SAMPLES))
    dials = REAL | {"protocol": protocol, "settings": settings, "correct": correct, "clip_norm": 0.5}
    spread = Spread(lab, warm_others, script, workers=4, here=here, store_hosts=store_hosts, **dials)
    spread.hosts(1, 3 - here)
    far = spread.finish()
    assert far.result.status == "finished", far.end.detail
    assert far.result.correct == correct
    (far.folder / "config.json").write_bytes(msgspec.json.encode(spread.running.config))
    again = shell("replay", far.folder, "--json")
    assert again.json["verdict"] == "the same verdicts, the same weights bit for bit", again.err
    looks = [(look.version, look.values) for look in far.of(Evaluated)]
    replayed = read_trace(Path(again.json["run"]))
    assert looks == [(look.version, look.values) for look in replayed if isinstance(look, Evaluated)]


EVALUATES_ITSELF = """
import sys
sys.path.insert(0, {scripts!r})
import paceline
from torch.utils.data import DataLoader, TensorDataset
from cases import CASES

pace = paceline.join("asp")
case = CASES["momentum"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(32)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(2):
    for x, y in loader:
        case.iteration(model, optimizer, x, y)
    {evaluates}
pace.leave()
model.eval()
"""


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("evaluates", "dials", "warned"),
    [
        ("model.eval().train()", {}, True),
        ("model.eval().train()", {"correct": "none"}, False),
        ("model.eval().train()", {"protocol": "bsp"}, False),
        ("model[0].eval().train()", {}, False),
        ("pace.evaluate(lambda model: float(model.eval().training))", {}, False),
    ],
)
def test_who_evaluates_a_look_ahead_by_itself_is_told_once(
    lab: Lab, evaluates: str, dials: dict[str, Any], warned: bool
) -> None:
    script = lab.script(EVALUATES_ITSELF.format(scripts=str(SCRIPTS), evaluates=evaluates))
    run = lab.trained(script, **{"workers": 2, "correct": "auto"} | dials)
    told = [note.text for note in run.of(Note) if "calls model.eval() on a look-ahead" in note.text]
    assert [text[:6] for text in sorted(told)] == (["rank 0", "rank 1"] if warned else [])
