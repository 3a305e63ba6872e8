"""What a batch takes in a full simulated pipeline: what its busiest stage computes, and no more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sim import Cluster, Fixed
from paceline_bench.papers.planned import batch_s

AGAIN = {"layerwise": 4 / 3, "fdg": 1.0, "adl": 1.0}
"""Of a forward and a backward: who keeps inputs only computes a batch's forward twice."""


@pytest.mark.parametrize("name", AGAIN)
@given(slow=st.lists(st.sampled_from([1.0, 1.2, 2.0, 5.0]), min_size=2, max_size=5))
@settings(max_examples=20, deadline=None)
def test_a_batch_takes_what_the_busiest_stage_computes_and_nobody_else_adds_to_it(
    name: str, slow: list[float]
) -> None:
    """The last stage has its gradient at once, and so no second forward."""
    cluster = Cluster(workers=len(slow), compute=Fixed(0.3), slow=dict(enumerate(slow)))
    busiest = max(0.3 * AGAIN[name] * max(slow[:-1]), 0.3 * slow[-1])
    assert batch_s(name, cluster, 40) == pytest.approx(busiest)


@given(slow=st.lists(st.sampled_from([1.0, 1.2, 2.0, 5.0]), min_size=2, max_size=5))
@settings(max_examples=20, deadline=None)
def test_stages_that_take_turns_take_the_sum(slow: list[float]) -> None:
    cluster = Cluster(workers=len(slow), compute=Fixed(0.3), slow=dict(enumerate(slow)))
    assert batch_s("bp", cluster, 40) == pytest.approx(0.3 * sum(slow))
