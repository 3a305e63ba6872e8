"""A replayed peer run: every word in the recorded order, so whatever depended on times comes again."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest

from paceline.protocols import PEERS
from paceline.trace.events import Came, Decided, Evaluated, Exchanged, Rested
from support.runs import Lab, Run
from support.tensors import assert_equal
from support.tight import TIGHT
from support.variants import label

WORKERS, SEED = 4, 11
SIZES = ("--samples", 90, "--batch", 4, "--epochs", 2, "--shuffle")
UNEQUAL: dict[str, Any] = {"device_time_s": 0.003, "jitter": 0.5, "slow": {2: 2.0}}
FOLLOWING_TIMES: dict[str, dict[str, Any]] = TIGHT | {
    "fedavg": {"period": 3, "fraction": 0.5},
    "hpsgd": {},
    "osp": {**TIGHT["osp"], "budget": "measured"},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, FOLLOWING_TIMES.get(name, {})) for name in sorted(PEERS)),
    ("dpsgd", {"topology": "matching"}),
    ("dpsgd", {"overlap": True, "topology": "one_peer"}),
    ("easgd", {"mode": "asynchronous", "period": 2}),
    ("osp", {**TIGHT["osp"], "budget": "times"}),
    ("easgd", {"mode": "asynchronous", "period": 2, "adaptive": True}),
    ("easgd", {"mode": "asynchronous", "period": 1, "lock": False}),
]


every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=label)


def dials(variant: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"workers": WORKERS, "protocol": variant[0], "settings": variant[1], "seed": SEED} | more


def outline(run: Run) -> list[tuple[Any, ...]]:
    """Who came, pushed, met, was released and evaluated, in order."""
    seen: list[tuple[Any, ...]] = []
    for e in run.trace:
        match e:
            case Decided():
                seen.append((e.number, e.pushed, e.fate, e.flushed, e.release, e.version, e.work))
            case Exchanged():
                seen.append((e.operation, e.workers, e.bytes))
            case Came() | Evaluated():
                seen.append((type(e).__name__, e.worker))
            case Rested():
                seen.append(("Rested",))
    return seen


def replayed(lab: Lab, run: Run, *args: object, variant: tuple[str, dict[str, Any]], **more: Any) -> Run:
    again = lab.trained(*map(str, args), **dials(variant, replay=str(run.folder), **more))
    assert outline(again) == outline(run)
    assert_equal(again.weights, run.weights)
    return again


@every_variant
def test_a_replayed_peer_run_arrives_at_the_same_weights_bit_for_bit(
    lab: Lab, variant: tuple[str, dict[str, Any]]
) -> None:
    args = ("train.py", "noisy", *SIZES)
    run = lab.trained(*args, **dials(variant), **UNEQUAL)
    replayed(lab, run, *args, variant=variant)


@pytest.mark.parametrize("script", ["peers.py", "apart.py"])
@every_variant
def test_evaluations_take_their_recorded_place(
    lab: Lab, variant: tuple[str, dict[str, Any]], script: str
) -> None:
    if "adaptive" in variant[1]:
        pytest.skip("these scripts report no loss")
    args = (script, "momentum", *(("--evaluate",) if script == "apart.py" else ()))
    run = lab.trained(*args, **dials(variant), **UNEQUAL)
    assert run.of(Rested)
    replayed(lab, run, *args, variant=variant)


@every_variant
def test_a_run_with_a_death_is_replayed_to_the_same_bits(
    lab: Lab, variant: tuple[str, dict[str, Any]]
) -> None:
    random = Random(label(variant))
    args = ("train.py", "momentum", "--samples", 240, "--batch", 4, "--epochs", 2)
    pause = lab.pause(random.randint(3, 8), 2, only=2)  # not all may be in the same round
    running = lab.start(*args, *pause, **dials(variant), **UNEQUAL)
    lab.until_paused(1)
    lab.go_on()
    time.sleep(random.uniform(0, 0.02))
    running.kill(2)
    run = lab.finish(running)
    assert run.died == {2}
    replayed(lab, run, *args, variant=variant)


@pytest.mark.parametrize("variant", [("ad_psgd", {}), ("local_sgd", {"period": 3})], ids=label)
def test_a_replay_of_peers_stops_at_any_verdict(lab: Lab, variant: tuple[str, dict[str, Any]]) -> None:
    args = ("train.py", "momentum", *SIZES)
    run = lab.trained(*args, **dials(variant), **UNEQUAL)
    early = lab.run(*args, **dials(variant, replay=str(run.folder), until=9))
    assert early.result.status == "stopped"
    assert [e.pushed for e in early.pushes] == [e.pushed for e in run.pushes if e.number <= 9]
