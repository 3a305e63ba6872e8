"""The pipeline's engine: its queues and counters, for any valid delays, in any order of turns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.parallel.pipeline.delays import Delays, parse_delays
from paceline.parallel.pipeline.engine import Schedule
from paceline.parallel.registry import PIPELINES, make_pipeline
from support.pipelines import blanks, train


@st.composite
def delays(draw: st.DrawFn, most: int = 3) -> Delays:
    """Any that are valid."""
    pairs = draw(st.lists(st.tuples(st.integers(0, most), st.integers(0, most)), max_size=4))
    m = [0]
    for p, q in reversed(pairs):
        m.insert(0, m[0] + p + q)
    return Delays((*(p for p, _ in pairs), 0), tuple(m))


seeds = st.integers(0, 2**16)


@given(delays(), st.integers(0, 12), seeds)
@settings(deadline=None, max_examples=40)
def test_every_stage_makes_one_update_for_every_batch_once_drained(d: Delays, count: int, seed: int) -> None:
    assert train(Schedule(d), None, blanks(count), seed=seed).updates == [count] * d.stages


@given(delays(), seeds)
@settings(deadline=None, max_examples=40)
def test_in_the_steady_state_m_k_updates_lie_between_forward_and_backward(d: Delays, seed: int) -> None:
    trained = train(Schedule(d), None, blanks(2 * d.drain + 3), seed=seed)
    for stage, seen in trained.staleness.items():
        assert seen[-1] == max(seen) == d.m[stage]


@given(st.integers(2, 5), seeds)
@settings(deadline=None, max_examples=40)
def test_backward_first_saves_one_update_of_staleness(stages: int, seed: int) -> None:
    d = Delays.uniform(stages, 1, 1)
    trained = train(Schedule(d, order="backward_first"), None, blanks(2 * d.drain + 3), seed=seed)
    assert [max(seen) for seen in trained.staleness.values()] == [max(0, m - 1) for m in d.m]


@given(delays(), seeds)
@settings(deadline=None, max_examples=40)
def test_at_most_m_k_and_one_batches_wait_at_stage_k(d: Delays, seed: int) -> None:
    trained = train(Schedule(d), None, blanks(2 * d.drain + 3), seed=seed)
    assert trained.longest == [m + 1 for m in d.m]


@given(delays(), seeds)
@settings(deadline=None, max_examples=40)
def test_the_first_update_of_stage_k_is_in_iteration_P_k_plus_m_k(d: Delays, seed: int) -> None:
    trained = train(Schedule(d), None, blanks(d.drain + 1), seed=seed)
    assert trained.first_update == [before + m for before, m in zip(d.before, d.m, strict=True)]


@given(delays(), st.integers(1, 4), st.integers(0, 11), seeds)
@settings(deadline=None, max_examples=40)
def test_accumulation_divides_the_updates_and_a_drain_leaves_nothing(
    d: Delays, every: int, count: int, seed: int
) -> None:
    trained = train(Schedule(d, every=every), None, blanks(count), seed=seed)
    assert trained.updates == [-(-count // every)] * d.stages


def test_the_papers_example_has_gradient_delays_of_one() -> None:
    assert Delays((1, 1, 0), (4, 2, 0)).q == (1, 1)
    assert parse_delays("", "", 3) == Delays((1, 1, 0), (4, 2, 0))


@pytest.mark.parametrize(
    ("p", "m", "said"),
    [
        ("1,1,0", "3,2,0", "m_0 - m_1 - p_0 = 0"),
        ("1,1,0", "2,2,0", "m_0 - m_1 - p_0 = -1 is < 0"),
        ("0,0,0", "1,2,0", "= -1"),
        ("1,1,0", "4,2,1", "last stage"),
        ("1,1,1", "4,2,0", "last stage"),
        ("-1,1,0", "4,2,0", "no p is negative"),
        ("1,0", "2,0", "2 stages, but the mesh has 3"),
        ("1,x,0", "4,2,0", "whole numbers"),
        ("1,1,0", "", "belong together"),
    ],
)
def test_delays_that_cannot_be_are_refused_with_what_would_do(p: str, m: str, said: str) -> None:
    if said.endswith("= 0"):
        assert parse_delays(p, m, 3).q[0] == 0
        return
    with pytest.raises(ConfigError, match=said):
        parse_delays(p, m, 3)


def test_a_stored_graph_with_newer_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="stored=graph needs weights=stashed"):
        Schedule(Delays.uniform(3, 1, 1), stored="graph", weights="current")


def test_backward_first_without_any_delay_is_refused() -> None:
    with pytest.raises(ConfigError, match="p \\+ q >= 1"):
        Schedule(Delays.uniform(3, 0, 0), order="backward_first")


@pytest.mark.parametrize("name", sorted(PIPELINES))
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_every_named_pipeline_trains_every_batch(name: str, stages: int) -> None:
    schedule = make_pipeline(name).schedule(stages)
    trained = train(schedule, None, blanks(12))
    assert trained.updates == [12 // schedule.every] * stages


def test_the_named_pipelines_have_the_delays_of_their_papers() -> None:
    table = {name: make_pipeline(name).schedule(4).delays for name in PIPELINES}
    assert table["bp"].m == (0, 0, 0, 0)
    assert (table["fr"].p, table["fr"].m) == ((0, 0, 0, 0), (3, 2, 1, 0))
    assert table["ddg"] == table["fr"]
    assert (table["fdg"].p, table["fdg"].m) == ((1, 1, 1, 0), (6, 4, 2, 0))
    assert table["adl"] == table["layerwise"] == table["fdg"]


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [("fdg", "shrink", "0"), ("fdg", "shrink", "1.5"), ("adl", "every", "0"), ("fdg", "data", "ad_psgd")],
)
def test_settings_out_of_range_are_refused(name: str, setting: str, value: str) -> None:
    with pytest.raises(ConfigError):
        make_pipeline(name, {setting: value}).schedule(3)
