"""What pipelines compute, in one process: gradients and weights against ordinary back-propagation."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from paceline.errors import ConfigError
from paceline.parallel.pipeline.blocks import check_apart, stage_of
from paceline.parallel.pipeline.computing import Computing
from paceline.parallel.pipeline.delays import Delays
from paceline.parallel.pipeline.engine import Backward, Forward, Schedule, Stored, Weights
from paceline.parallel.pipeline.in_turn import InTurn
from paceline.parallel.registry import PIPELINES, make_pipeline
from support.pipelines import batches, blocks, plain, train

from .test_engine import delays


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("extra", [False, True])
def test_zero_delays_are_ordinary_back_propagation_bit_for_bit(stages: int, extra: bool) -> None:
    model, data = blocks(stages, extra=extra), batches(10)
    torch.manual_seed(7)
    expected = plain(model, data)
    torch.manual_seed(7)
    assert same(train(make_pipeline("bp").schedule(stages), model, data).state, expected.state)


@given(
    delays(most=2),
    st.sampled_from([("inputs", "current"), ("inputs", "stashed"), ("graph", "stashed")]),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=15)
def test_with_rate_zero_every_gradient_is_that_of_back_propagation(
    d: Delays, kept: tuple[Stored, Weights], seed: int
) -> None:
    model, data = blocks(d.stages), batches(5)
    trained = train(Schedule(d, *kept), model, data, lr=0.0, momentum=0.0, seed=seed)
    expected = plain(model, data, lr=0.0, momentum=0.0)
    assert trained.gradients.keys() == expected.gradients.keys()
    for key, gradients in trained.gradients.items():
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[key][name], rtol=1e-6, atol=1e-7)


@given(delays(most=2), st.integers(0, 2**16))
@settings(deadline=None, max_examples=8)
def test_whose_turn_it_is_changes_no_bit_of_the_weights(d: Delays, seed: int) -> None:
    model, data = blocks(d.stages), batches(8)
    one, other = (train(Schedule(d), model, data, seed=s) for s in (0, seed))
    assert same(one.state, other.state)


@pytest.mark.parametrize("name", ["ddg", "fdg"])
def test_with_stashed_weights_a_gradient_is_exactly_that_at_the_diagonal_point(name: str) -> None:
    model, data = blocks(3), batches(9)
    trained = train(make_pipeline(name).schedule(3), model, data)
    for index, (x, y) in enumerate(data):
        point = {n: p for stage in range(3) for n, p in trained.weights[stage, index].items()}
        point = {n: p.clone().requires_grad_() for n, p in point.items()}
        F.cross_entropy(functional_call(model, point, (x,)), y).backward()
        for stage in range(3):
            for n, gradient in trained.gradients[stage, index].items():
                assert torch.equal(gradient, point[n].grad), (stage, index, n)


def test_shrinking_scales_stage_k_by_beta_to_the_hops_behind_it() -> None:
    model, data = blocks(3), batches(4)
    shrunk = train(make_pipeline("fdg", {"shrink": 0.5}).schedule(3), model, data, lr=0.0)
    whole = train(make_pipeline("fdg").schedule(3), model, data, lr=0.0)
    for (stage, index), gradients in whole.gradients.items():
        for n, gradient in gradients.items():
            expected = gradient * 0.5 ** (2 - stage)
            torch.testing.assert_close(shrunk.gradients[stage, index][n], expected)


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_running_statistics_are_counted_once_for_every_batch(name: str) -> None:
    model, data = blocks(3, extra=True), batches(7)
    trained = train(make_pipeline(name).schedule(3), model, data)
    counted = [v for n, v in trained.state.items() if n.endswith("num_batches_tracked")]
    assert [int(v) for v in counted] == [7, 7, 7]


def test_computing_once_more_uses_the_same_dropout_and_the_same_statistics() -> None:
    torch.manual_seed(0)
    row = stage_of(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)), [], 0)
    optimizer = torch.optim.SGD(row.parameters(), lr=0.1)
    computing = Computing(row, False, None, optimizer)
    x, weight = torch.randn(8, 6), torch.randn(8, 6)
    torch.manual_seed(3)
    out = computing.forward(Forward(0, "inputs", stash=False), x, None)
    statistics = {n: b.clone() for n, b in row.named_buffers()}
    torch.rand(17)
    drawn = torch.get_rng_state()
    computing.backward(Backward(0, again=True, scale=1.0), weight)
    assert same(dict(row.named_buffers()), statistics)
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.manual_seed(3)
    again = x.clone().requires_grad_()
    fresh = functional_call(row, {n: b.clone() for n, b in row.named_buffers()}, (again,))
    torch.testing.assert_close(fresh, out)
    (expected,) = torch.autograd.grad(fresh, row[0].weight, weight)
    torch.testing.assert_close(row[0].weight.grad, expected)


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_stages_in_turn_train_as_in_any_other_order(name: str) -> None:
    """What counts samples to an accuracy computes what workers do."""
    model, data = blocks(3), batches(9)
    schedule = make_pipeline(name).schedule(3)
    expected = train(schedule, model, data, seed=4)
    alone = deepcopy(model)
    pipe = InTurn(
        schedule, alone, (1, 2), F.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    )
    for x, y in data:
        pipe.step(x, y)
    pipe.settle()
    assert same(alone.state_dict(), expected.state)


def test_prediction_without_momentum_changes_no_bit() -> None:
    model, data = blocks(3), batches(8)
    named = [make_pipeline("fdg", {"predict": on}).schedule(3) for on in (False, True)]
    one, other = (train(schedule, model, data, momentum=0.0) for schedule in named)
    assert same(one.state, other.state)
    one, other = (train(schedule, model, data, momentum=0.9) for schedule in named)
    assert not same(one.state, other.state)


def test_a_parameter_on_two_stages_is_refused_with_both_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    check_apart(model, ())
    with pytest.raises(
        ConfigError, match=r"0\.weight and 2\.weight are one parameter, but lie on stages 0 and 1"
    ):
        check_apart(model, (2,))


def test_a_block_that_returns_several_tensors_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    with pytest.raises(ConfigError, match=r"block '1' \(LSTM\) returned a tuple"):
        stage_of(model, [], 0)(torch.zeros(2, 4))
