"""Workers that are parked while a run goes on, in real runs, their replay and exact simulations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.sim.request import ClusterRequest
from paceline.trace import read_trace
from paceline.trace.events import Note
from support.runs import SCRIPTS, Lab, Run, Running, once, wait_until
from support.shell import Shell
from support.tensors import assert_equal

SAMPLES, EPOCHS, WORKERS = 1600, 2, 3
SIZES = ("--samples", SAMPLES, "--batch", 4, "--epochs", EPOCHS)
TWO = 0.611
"""With steps of 0.1 and momentum 0.9, each push a whole one, that curvature leaves room for two workers."""
DIALS: dict[str, Any] = {"workers": WORKERS, "protocol": "asp", "weighting": "sum", "park_slow": TWO}
REAL: dict[str, Any] = {"device_time_s": 0.002, "slow": {2: 4.0}}
CLUSTER = msgspec.to_builtins(
    ClusterRequest(workers=WORKERS, slow={2: 2.5}, compute_s=0.1, jitter=0.3, batch=4), str_keys=True
)


def parked(notes: list[Note]) -> list[int]:
    """Whom these say were parked, in order."""
    told = (note.text.partition("parked: rank ")[2] for note in notes)
    return [int(text.partition(",")[0]) for text in told if text]


def until_parked(running: Running) -> int:
    """Wait until somebody is; who it is."""

    def found() -> list[int]:
        return parked([e for e in read_trace(running.config.path) if isinstance(e, Note)])

    wait_until(lambda: bool(found()), "a worker is parked")
    return found()[0]


@pytest.mark.parametrize("protocol", ["asp", "ssp", "dssp"])
def test_an_exact_simulation_parks_the_slow_one_and_repeats(lab: Lab, protocol: str) -> None:
    dials = DIALS | {"cluster": CLUSTER, "protocol": protocol}
    run, again = (lab.trained("train.py", "momentum", *SIZES, **dials) for _ in range(2))
    assert parked(run.of(Note)) == [2]
    assert run.used() == once(EPOCHS, SAMPLES)
    slow = [number for number, push in enumerate(run.pushes) if push.pushed == 2]
    assert slow[-1] < 200 + 2 * WORKERS
    assert_equal(run.weights, again.weights)


def test_nobody_is_parked_where_the_learning_rate_stands_all(lab: Lab) -> None:
    dials = DIALS | {"cluster": CLUSTER}
    run = lab.trained("train.py", "momentum", *SIZES, **dials | {"park_slow": 0.4})
    plain = lab.trained("train.py", "momentum", *SIZES, **dials | {"park_slow": None})
    assert not parked(run.of(Note))
    assert_equal(run.weights, plain.weights)


def test_a_real_run_is_replayed_to_the_same_bits(shell: Shell) -> None:
    asked = ("-p", "asp", "-n", 3, "--slow", "2:4", "--device-time", 0.002, "--weighting", "sum")
    ran = shell(
        "train", SCRIPTS / "train.py", *asked, "--park-slow", TWO, "--json", "--", "momentum", *SIZES
    )  # fmt: skip
    assert ran.code == 0, ran.err
    folder = shell.runs / ran.json["run"]
    assert parked([e for e in read_trace(folder) if isinstance(e, Note)])
    again = shell("replay", folder, "--json")
    assert again.code == 0, again.err
    assert again.json["identical"] is True


def paused(lab: Lab) -> tuple[Running, int]:
    """A run whose two faster workers wait for a file; and who is parked."""
    pause = ("--pause", lab.root / "go on", "--before", 150)
    running = lab.start("train.py", "momentum", *SIZES, *pause, **DIALS, **REAL)
    lab.until_paused(2)
    return running, until_parked(running)


def test_a_parked_worker_goes_on_when_another_dies(lab: Lab) -> None:
    running, aside = paused(lab)
    victim = 3 - aside
    running.kill(victim)
    (lab.root / "go on").touch()
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    assert run.died == {victim}
    assert run.used() == once(EPOCHS, SAMPLES)
    assert any(f"called back, as there is room for 2: rank {aside}" in note.text for note in run.of(Note))


def test_a_run_with_a_parked_worker_is_stopped_in_good_order_and_resumed(lab: Lab) -> None:
    running, _ = paused(lab)
    running.stop()
    (lab.root / "go on").touch()
    first: Run = lab.finish(running)
    assert first.result.status == "stopped", first.end.detail
    assert not first.died
    resume = str(first.folder / "checkpoint")
    second = lab.trained("train.py", "momentum", *SIZES, resume=resume, **DIALS)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)


EVALUATES = """
import sys
sys.path.insert(0, {scripts!r})
from cases import CASES
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join("asp")
case = CASES["momentum"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples({samples})), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    for number, (x, y) in enumerate(loader):
        case.iteration(model, optimizer, x, y)
        if number % 20 == 0:
            pace.evaluate(lambda: 0.0)
pace.gather(1.0)
"""


@pytest.mark.parametrize("curvature", [TWO, 2.0])
def test_evaluations_and_a_gather_at_the_end_find_everybody(lab: Lab, curvature: float) -> None:
    """With a curvature of 2 one worker is all that is allowed: while it evaluates, the others go on."""
    script = lab.script(EVALUATES.format(scripts=str(SCRIPTS), samples=SAMPLES))
    run = lab.trained(script, **DIALS | {"park_slow": curvature}, **REAL)
    assert parked(run.of(Note))
    assert run.used() == once(EPOCHS, SAMPLES)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("train", SCRIPTS / "train.py", "-n", 2, "-p", "bsp"), "which protocol 'bsp' does not allow"),
        (("train", SCRIPTS / "train.py", "-n", 2, "-p", "dpsgd"), "which protocol 'dpsgd' does not allow"),
        (("train", SCRIPTS / "train.py", "-n", 1), "this run has 1"),
        (("train", SCRIPTS / "train.py", "-n", 2, "--balance"), "--balance gives them less"),
        (("train", SCRIPTS / "train.py", "-n", 2, "--shards", "equal"), "gives each a share"),
        (("simulate", "-p", "asp"), "a simulation of times has none"),
        (("simulate", "-p", "bsp", "--lr", 0.1), "which protocol 'bsp' does not allow"),
        (("simulate", SCRIPTS / "train.py", "-p", "asp", "--lr", 0.1), "a script has a rate of its own"),
        (("simulate", "-p", "layerwise", "--mesh", "stage=4"), "a split model does not look at --park-slow"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    shell: Shell, asked: tuple[object, ...], why: str
) -> None:
    ran = shell(*map(str, asked), "--park-slow", 1, *(("--", "sgd") if asked[0] == "train" else ()))
    assert ran.code == 2
    assert why in ran.error


def test_a_rate_that_nothing_looks_at_is_refused(shell: Shell) -> None:
    ran = shell("simulate", "-p", "asp", "--lr", 0.1)
    assert (ran.code, "only looked at by --park-slow" in ran.error) == (2, True)


def test_a_simulation_of_times_parks_too(shell: Shell) -> None:
    """With this rate three of four may be active, as a push is part of a mean; were it a whole step, one."""
    cluster = ("-n", 4, "--slow", "3:4", "--iterations", 200, "--weighting", "mean", "--jitter", 0.1)
    ran = shell("simulate", "-p", "asp", *cluster, "--park-slow", 1, "--lr", 1.29, "--json")
    assert ran.code == 0, ran.err
    notes = [e for e in read_trace(shell.runs / ran.json["run"]) if isinstance(e, Note)]
    assert parked(notes) == [3]
