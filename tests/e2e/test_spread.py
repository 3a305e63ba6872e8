"""A store on several hosts: the same run as with one, whatever happens to the wires between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.engines.local import LocalEngine
from support.runs import Lab, once
from support.spread import Spread
from support.tensors import assert_equal

SAMPLES, BATCH, EPOCHS = 240, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def others(warm_lab: Lab) -> Iterator[list[LocalEngine]]:
    """Engines of two other hosts."""
    engines = [LocalEngine(), LocalEngine()]
    warm_lab.further.update(engine._process.pid for engine in engines)
    yield engines
    for engine in engines:
        warm_lab.further.discard(engine._process.pid)
        engine.close()


@pytest.mark.parametrize("case", ["momentum", "adamw"])
@pytest.mark.parametrize("store_hosts", [2, 3])
def test_bsp_with_a_spread_store_equals_bsp_on_one_host_bit_for_bit(
    lab: Lab, others: list[LocalEngine], case: str, store_hosts: int
) -> None:
    dials = {"workers": 4, "protocol": "bsp", "seed": 5}
    near = lab.trained("train.py", case, *SIZES, "--shuffle", **dials)
    spread = Spread(
        lab, others, "train.py", case, *SIZES, "--shuffle", here=2, store_hosts=store_hosts, **dials
    )
    spread.hosts(1, 1)
    far = spread.finish()
    assert far.result.status == "finished", far.end.detail
    assert_equal(far.weights, near.weights)
    assert far.used() == once(EPOCHS, SAMPLES)
