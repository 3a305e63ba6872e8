"""A store on several hosts: the same run as with one, whatever happens to the wires between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

from e2e.scripts.cases import CASES
from paceline.engines.local import LocalEngine
from support.runs import Lab, Run, once
from support.spread import Spread
from support.tensors import assert_equal

SAMPLES, BATCH, EPOCHS = 160, 4, 2
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
DIALS = {"workers": 4, "here": 2, "device_time_s": 0.003, "slow": {3: 2.0}}
HELD = [
    ("hybrid_sgd", {"threshold": "constant", "first": 3, "wait": "never"}),
    ("bounded_ps", {"staleness": 3, "buffered": True, "resync": 3}),
    ("backup_bsp", {"backups": 1, "late": "apply"}),
]
"""Protocols under which a worker may run on while its gradient waits."""
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def others(warm_lab: Lab) -> Iterator[list[LocalEngine]]:
    """Engines of two other hosts."""
    engines = [LocalEngine(), LocalEngine()]
    warm_lab.further.update(engine._process.pid for engine in engines)
    yield engines
    for engine in engines:
        warm_lab.further.discard(engine._process.pid)
        engine.close()


def assert_each_gradient_is_in_every_portion_once(run: Run) -> None:
    """Whole numbers add up exactly in any order: each parameter is its start minus every gradient."""
    x, _ = CASES["exact_in_parts"].samples(SAMPLES)
    pushed = sum((x[first : first + size].sum(0) for p in run.pushes for _, first, size in p.work), x[0] * 0)
    start = torch.arange(5.0, dtype=pushed.dtype)
    assert len(run.weights) == 5
    for name, tensor in run.weights.items():
        torch.testing.assert_close(tensor, start - pushed, msg=f"{name} differs")
    assert run.used() == once(EPOCHS, SAMPLES)


@pytest.mark.parametrize(
    ("case", "store_hosts", "workers"),
    [("momentum", 2, (2,)), ("adamw", 2, (1, 1)), ("momentum", 3, (1, 1)), ("normed", 3, (2, 2))],
)
def test_bsp_with_a_spread_store_equals_bsp_on_one_host_bit_for_bit(
    lab: Lab, others: list[LocalEngine], case: str, store_hosts: int, workers: tuple[int, ...]
) -> None:
    dials = {"workers": 4, "protocol": "bsp", "seed": 5}
    args = ("train.py", case, *SIZES, "--shuffle")
    near = lab.trained(*args, **dials)
    spread = Spread(lab, others, *args, here=4 - sum(workers), store_hosts=store_hosts, **dials)
    spread.hosts(*workers)
    far = spread.finish()
    assert far.result.status == "finished", far.end.detail
    assert_equal(far.weights, near.weights)
    assert far.used() == once(EPOCHS, SAMPLES)


@pytest.mark.parametrize("protocol", ["asp", "ssp", "dssp"])
def test_wires_cut_again_and_again_lose_and_double_no_gradient_in_any_portion(
    lab: Lab, others: list[LocalEngine], protocol: str
) -> None:
    settings = {"staleness": 2} if protocol == "ssp" else {}
    dials = DIALS | {"protocol": protocol, "settings": settings, "weighting": "sum", "store_hosts": 3}
    spread = Spread(lab, others, "train.py", "exact_in_parts", *SIZES, **dials)
    spread.hosts(1, 1)
    spread.running.until_training()
    random = Random(protocol)
    for _ in range(8):
        time.sleep(random.uniform(0, 0.1))
        spread.cut()
    run = spread.finish()
    assert run.result.status == "finished", run.end.detail
    assert not run.died
    assert_each_gradient_is_in_every_portion_once(run)
    assert all(door.connections > 3 for door in spread.doors)
    assert protocol != "ssp" or max(push.gap for push in run.pushes) <= 2


@pytest.mark.parametrize(("protocol", "settings"), HELD)
def test_a_held_gradient_counts_once_in_every_portion_also_if_its_worker_runs_on(
    lab: Lab, others: list[LocalEngine], protocol: str, settings: dict[str, Any]
) -> None:
    dials = DIALS | {"protocol": protocol, "settings": settings, "weighting": "sum", "store_hosts": 3}
    spread = Spread(lab, others, "train.py", "exact_in_parts", *SIZES, **dials)
    spread.hosts(1, 1)
    run = spread.finish()
    assert run.result.status == "finished", run.end.detail
    assert_each_gradient_is_in_every_portion_once(run)


def test_cut_wires_change_no_bit_of_bsp(lab: Lab, others: list[LocalEngine]) -> None:
    dials = {"workers": 4, "protocol": "bsp"}
    near = lab.trained("train.py", "momentum", *SIZES, **dials)
    spread = Spread(lab, others, "train.py", "momentum", *SIZES, here=2, store_hosts=3, **dials)
    spread.hosts(1, 1)
    for _ in range(20):
        time.sleep(0.03)
        spread.cut()
    assert_equal(spread.finish().weights, near.weights)
