"""A peer's memories as the owner sees them: which place holds what, and how far replicas are apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import RunError
from paceline.store import replicas
from paceline.store.layout import Layout, describe
from paceline.store.replicas import (
    BUFFERS,
    GRADIENTS,
    LENT,
    PARAMETERS,
    Brought,
    Replica,
    Summing,
    answer_bytes,
    in_equal_shares,
    is_buffers,
)

TURN = (0, 0, 0)


def layout_of() -> Layout:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    return describe(model, list(model.parameters()))


def memory(size_bytes: int) -> Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8)


def replica() -> tuple[Replica, Layout]:
    layout = layout_of()
    answers = memory(answer_bytes(layout))
    return Replica(layout, memory(layout.weights_bytes), memory(layout.segment_bytes), answers), layout


def lent(one: Replica, layout: Layout, count: int) -> list[Tensor]:
    made = [memory(answer_bytes(layout)) for _ in range(count)]
    for each in made:
        one.lend(each)
    return made


def test_memory_that_is_lent_has_a_place_for_parameters_then_one_for_buffers() -> None:
    assert [is_buffers(place) for place in range(LENT + 6)] == [False, False, True, *[False, True] * 3]
    one, layout = replica()
    made = lent(one, layout, 3)
    for number, each in enumerate(made):
        assert one.lent(LENT + 2 * number) is one.lent(LENT + 2 * number + 1) is each
        assert [part.numel() for part in one.parts(LENT + 2 * number)] == [
            part.numel() for part in one.parts(PARAMETERS)
        ]
        assert [part.numel() for part in one.parts(LENT + 2 * number + 1)] == [2, 2]
    with pytest.raises(RunError, match="place 2 is not one that is lent"):
        one.lent(BUFFERS)


def test_the_halves_of_a_memory_do_not_touch_each_other() -> None:
    one, layout = replica()
    lent(one, layout, 1)
    for part in one.parts(LENT):
        part.fill_(1.0)
    assert all(float(part.abs().sum()) == 0 for part in one.parts(LENT + 1))


def test_a_replica_stands_where_it_was_after_so_many_iterations_or_after_its_last() -> None:
    one, layout = replica()
    lent(one, layout, 2)
    assert one.place_at(7) == PARAMETERS
    one.stood(3, LENT)
    one.stood(5, LENT + 2)
    assert [one.place_at(stage) for stage in (2, 3, 4, 5, 9)] == [PARAMETERS, LENT, LENT, LENT + 2, LENT + 2]
    assert one.at(4) == (one.parts(LENT), one.parts(LENT + 1))
    assert one.at(2) == (one.parts(PARAMETERS), one.parts(BUFFERS))
    one.needed_from(5)
    assert [one.place_at(stage) for stage in (4, 5)] == [PARAMETERS, LENT + 2]


def test_an_answer_goes_where_it_was_asked_for_else_where_all_answers_go() -> None:
    one, layout = replica()
    lent(one, layout, 1)
    one.bring(TURN, Brought(GRADIENTS, LENT, frozenset()))
    assert one.answer(TURN) is one.parts(LENT)
    one.bring(TURN, Brought(BUFFERS, 0, frozenset()))
    assert one.vector(TURN) is one.parts(BUFFERS)
    assert one.answer(TURN) is one.answer_like(BUFFERS) is not one.answer_like(PARAMETERS)
    one.forget(TURN)
    with pytest.raises(KeyError):
        one.brought(TURN)


def test_what_is_kept_elsewhere_stands_for_it() -> None:
    one, _ = replica()
    assert one.standing is one.parts(PARAMETERS)
    one.stand_in = [torch.ones(1)]
    assert one.standing is one.stand_in


def test_the_spread_is_the_root_of_the_mean_square_also_chunk_by_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = torch.Generator().manual_seed(0)
    vectors = [[torch.randn(size, generator=drawn) for size in (5, 3)] for _ in range(4)]
    mean = [torch.empty(5), torch.empty(3)]
    summing = Summing()
    norm = summing.add_up(in_equal_shares(vectors), [mean])
    flat = torch.stack([torch.cat(parts).double() for parts in vectors])
    assert norm == pytest.approx(float(flat.mean(0).norm()), rel=1e-5)
    expected = math.sqrt(float((flat - torch.cat(mean).double()).square().sum(1).mean()))
    assert summing.spread(vectors, mean) == pytest.approx(expected)
    monkeypatch.setattr(replicas, "CHUNK", 2)
    assert summing.spread(vectors, mean) == pytest.approx(expected)
    again = [torch.empty(5), torch.empty(3)]
    assert summing.add_up(in_equal_shares(vectors), [again]) == pytest.approx(norm)
    assert all(torch.equal(a, b) for a, b in zip(again, mean, strict=True))


def test_a_norm_beyond_single_precision_is_still_one_and_what_is_not_finite_has_none() -> None:
    into = [torch.empty(4)]
    large = [torch.full((4,), 1e30)]
    assert Summing().add_up([(large, 1.0)], [into]) == pytest.approx(2e30)
    assert not math.isfinite(Summing().add_up([([torch.tensor([1.0, math.inf, 0.0, 0.0])], 1.0)], [into]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_written_to_everybody_who_wants_it(dtype: torch.dtype) -> None:
    vectors = [[torch.tensor([1.0, 2.0], dtype=dtype)], [torch.tensor([3.0, 6.0], dtype=dtype)]]
    into = [[torch.zeros(2, dtype=dtype)] for _ in range(3)]
    Summing().add_up([(vectors[0], 0.5), (vectors[1], 0.25)], into)
    assert all(part.tolist() == [1.25, 2.5] for (part,) in into)
