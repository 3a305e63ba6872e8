"""Rules for stale gradients, and what all corrections share: checkpoints, portions, which one a run gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from paceline.corrections import parse_correction
from paceline.errors import ConfigError
from paceline.store.corrections.choice import choose
from paceline.store.corrections.correction import (
    MARK,
    GradientPart,
    Stride,
    corrected_by,
    memory_bytes,
    without_ours,
)
from paceline.store.parameters import Gradients, ParameterStore
from paceline.store.spread.portions import (
    FirstPortion,
    PortionStore,
    Pushed,
    StepEach,
    cut,
    of_whole,
    to_whole,
)
from support.corrected import SIZE, Crew, close, noise, plain

HERE = Pushed(0, 0, 0)


@pytest.mark.parametrize("how", ["gap", "dc", "dca", "dana+gap"])
@examples(max_examples=20)
@given(st.lists(st.integers(0, 99), max_size=5))
def test_a_gradient_that_is_not_stale_stays_as_it_is(how: str, seeds: list[int]) -> None:
    crew = Crew(how, momentum=0.9)
    for seed in seeds:
        if how.startswith("dana"):
            crew.push(0, noise(seed))
        else:
            crew.store.apply(crew.gradients(noise(seed)), crew.settings, 1.0)
    gradients = crew.gradients(noise(100))
    crew.store.mend(gradients, crew.store.weights.clone())
    assert torch.equal(torch.cat([view.flatten() for view in gradients.views]), noise(100))


def mended(crew: Crew, read: Tensor) -> Tensor:
    gradients = crew.gradients(noise(100))
    crew.store.mend(gradients, read)
    return torch.cat([view.flatten() for view in gradients.views])


def test_gap_divides_by_how_many_mean_steps_the_weights_have_moved() -> None:
    crew = Crew("gap")
    read, begin = crew.store.weights.clone(), crew.weights
    crew.store.apply(crew.gradients(torch.ones(SIZE, dtype=torch.float64)), crew.settings, 1.0)
    for _ in range(3):
        crew.store.apply(crew.gradients(torch.ones(SIZE, dtype=torch.float64)), crew.settings, 1.0)
    close(crew.weights, begin - 4 * 0.1)
    close(mended(crew, read), noise(100) / (1 + 4))


def test_gap_after_dana_counts_one_mean_step_as_none() -> None:
    crew = Crew("dana+gap", momentum=0.5)
    read = crew.store.weights.clone()
    crew.push(0, torch.ones(SIZE, dtype=torch.float64))
    close(mended(crew, read), noise(100))
    crew.push(0, torch.ones(SIZE, dtype=torch.float64))
    mean = 0.1 + (0.15 - 0.1) / 100
    close(mended(crew, read), noise(100) / (0.25 / mean))


def test_delay_compensation_adds_the_square_times_the_way() -> None:
    crew = Crew("dc:0.5")
    read, begin = crew.store.weights.clone(), crew.weights
    crew.store.apply(crew.gradients(noise(1)), crew.settings, 1.0)
    close(mended(crew, read), noise(100) + 0.5 * noise(100) ** 2 * (crew.weights - begin))
    adaptive = Crew("dca:0.5")
    adaptive.store.apply(adaptive.gradients(noise(1)), adaptive.settings, 1.0)
    strength = 0.5 / torch.sqrt(0.05 * noise(100) ** 2 + 1e-7)
    close(mended(adaptive, read), noise(100) + strength * noise(100) ** 2 * (crew.weights - begin))


@pytest.mark.parametrize("how", ["dana", "dana+gap", "gap", "dca"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_checkpoint_brings_back_every_momentum(how: str, name: str) -> None:
    """And everything else that a correction remembers: both go on to the same bits."""
    settings = {"momentum": 0.9} if name == "SGD" else {}
    one, other = (Crew(how, name, **settings) for _ in range(2))
    go_on(one, range(7))
    tensors, values = one.store.export()
    other.store.load(tensors, values)
    other.store.weights.copy_(one.store.weights)
    if "dana" in how:
        assert other.corrections.workers == [0, 1, 2]
        one.store.hand_out(one.copies[0])
        other.store.hand_out(other.copies[0])
        assert torch.equal(one.copies[0], other.copies[0])
    start = one.store.weights.clone()
    for crew in (one, other):
        crew.copies = {rank: start.clone() for rank in range(3)}
        go_on(crew, range(20, 27))
    assert torch.equal(one.store.weights, other.store.weights)
    assert all(torch.equal(one.copies[rank], other.copies[rank]) for rank in range(3))


def go_on(crew: Crew, numbers: range) -> None:
    for number in numbers:
        worker, gradients = number % 3, crew.gradients(noise(number))
        crew.store.mend(gradients, crew.copies[worker])
        if crew.store.looks_ahead:
            part = GradientPart(worker, gradients, 1.0)
            stride = Stride(1 / 3, 1 / 3, 3)
            crew.store.apply_each([part], crew.settings, stride, [crew.copies[worker]])
        else:
            crew.store.apply(gradients, crew.settings, 1 / 3, copies=[crew.copies[worker]])


def test_another_correction_takes_nothing_from_a_checkpoint() -> None:
    one, other = Crew("dana", momentum=0.9), Crew("dana+gap", momentum=0.9)
    go_on(one, range(4))
    other.store.load(*one.store.export())
    assert other.corrections.workers == []
    plain_one = Crew("none", momentum=0.9)
    plain_one.store.load(*one.store.export())
    assert plain_one.store.optimizer.state == {}


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_portions_are_corrected_as_the_whole_is_bit_for_bit(name: str) -> None:
    settings = {"momentum": 0.9, "weight_decay": 0.1} if name == "SGD" else {}
    crew = Crew("dana+gap", name, **settings)
    first, *others = cut(crew.layout, 3)
    own = FirstPortion(crew.layout, crew.spec, first, crew.store.weights.clone())
    stores = [PortionStore(crew.layout, crew.spec, part, crew.store.weights.clone()) for part in others]
    for store in (own, *stores):
        store.correct("dana+gap")
    copies = {rank: crew.store.weights.clone() for rank in range(3)}
    for number in range(9):
        worker, whole = number % 3, crew.gradients(noise(number))
        pieces = {store: crew.gradients(noise(number)) for store in (own, *stores)}
        views = {store: _seen(store, pieces[store]) for store in pieces}
        own.pushed[views[own]] = HERE
        crew.store.mend(whole, crew.copies[worker])
        crew.store.apply_each(
            [GradientPart(worker, whole, 1.0)], crew.settings, Stride(0.3, 0.3, 3), _of(crew, worker)
        )
        for store, seen in views.items():
            store.mend(seen, copies[worker])
            store.apply_each([GradientPart(worker, seen, 1.0)], crew.settings, Stride(0.3, 0.3, 3))
        for store in views:
            store.hand_out(copies[worker])
        assert torch.equal(copies[worker], crew.copies[worker])
    assert isinstance(own.done[-1], StepEach)
    tensors = [to_whole(crew.spec, first, own.export()[0])]
    tensors += [to_whole(crew.spec, part, s.export()[0]) for part, s in zip(others, stores, strict=True)]
    whole_state = crew.store.export()[0]
    for part in tensors:
        assert all(torch.equal(value, whole_state[key]) for key, value in part.items())
    assert sum(map(len, tensors)) == len(whole_state)
    assert of_whole(crew.spec, first, whole_state).keys() == own.export()[0].keys()


def _of(crew: Crew, worker: int) -> list[Tensor]:
    return [crew.copies[worker]]


def _seen(store: ParameterStore, whole: Gradients) -> Gradients:
    """The same gradient in memory that a portion looks at."""
    memory = whole.flats[0].untyped_storage()
    return Gradients(store.layout, torch.tensor([], dtype=torch.uint8).set_(memory))  # type: ignore[call-overload]


def chosen(asked: str, name: str = "SGD", lockstep: bool = False, **settings: Any) -> tuple[str, str]:
    layout, spec, _, _ = plain(name, **settings)
    choice = choose(asked, "asp", lockstep, spec, layout)
    return choice.name, choice.remark


def test_auto_is_dana_where_gradients_are_stale_and_there_is_a_momentum() -> None:
    for name, settings in (("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {}), ("NAdam", {})):
        correct, remark = chosen("auto", name, **settings)
        assert correct == "dana"
        assert remark.startswith("correcting stale momentum with DANA")
    for name, settings in (("SGD", {}), ("RMSprop", {"momentum": 0.9}), ("Adam", {"amsgrad": True})):
        correct, remark = chosen("auto", name, **settings)
        assert correct == "none"
        assert remark.startswith("stale gradients are not corrected: ")
    assert chosen("auto", momentum=0.9, lockstep=True) == ("none", "")


def test_lockstep_ignores_a_correction_and_says_so() -> None:
    correct, remark = chosen("dana", momentum=0.9, lockstep=True)
    assert correct == "none"
    assert "ignored" in remark


def test_without_momentum_dana_is_plain() -> None:
    correct, remark = chosen("dana")
    assert correct == "none"
    assert "changes nothing" in remark
    assert chosen("none", momentum=0.9) == ("none", "")


def test_what_has_no_momentum_of_its_own_refuses_dana() -> None:
    for name, settings in (("RMSprop", {}), ("SGD", {"momentum": 0.9, "dampening": 0.1})):
        with pytest.raises(ConfigError, match="gives every worker a momentum"):
            chosen("dana", name, **settings)
    assert chosen("gap", "RMSprop")[0] == "gap"


@pytest.mark.parametrize("text", ["dna", "dana+dana", "gap+dc", "gap:2", "dc:-1", "dc:x", "", "auto+gap"])
def test_a_name_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Use auto, none, dana"):
        parse_correction(text)


def test_a_checkpoint_tells_which_correction_it_is_of() -> None:
    assert corrected_by([3, "correct", {"lr": 0.1}, {"correct": "dana"}]) == "dana"
    assert corrected_by([3, {"lr": 0.1}]) == "none"


def test_an_optimizers_own_state_is_found_among_what_a_store_has_saved() -> None:
    assert without_ours({"0.momentum_buffer": 1, "1.step": 2}) == {"0.momentum_buffer": 1, "1.step": 2}
    ours = {f"0.{MARK}0": 1, "0.step": 2}
    assert without_ours(ours) == {"0.step": 2}


@pytest.mark.parametrize(
    ("how", "name", "vectors"),
    [
        ("none", "SGD", 0),
        ("dana", "SGD", 5),
        ("dana", "Adam", 6),
        ("gap", "SGD", 1),
        ("dca", "SGD", 1),
        ("dc", "SGD", 0),
    ],
)
def test_memory_is_one_vector_for_each_worker_and_what_they_share(how: str, name: str, vectors: int) -> None:
    layout, spec, _, _ = plain(name)
    assert memory_bytes(layout, spec, how, 4) == vectors * layout.gradient_bytes


@pytest.mark.parametrize("how", ["none", "gap", "dana", "dana+gap"])
def test_a_store_says_whether_it_mends_gradients_and_looks_ahead(how: str) -> None:
    store = ParameterStore(*plain(momentum=0.9)[:3])
    assert (store.mends, store.looks_ahead) == (False, False)
    if how != "none":
        store.correct(how)
    assert (store.mends, store.looks_ahead) == ("gap" in how, "dana" in how)


def test_what_to_use_instead_of_dana_is_said_where_dana_was_asked_for() -> None:
    with pytest.raises(ConfigError, match="Leave --correct dana out, or use --correct gap or dc"):
        chosen("dana", "RMSprop")
    assert "momentum_decay is not used" in chosen("dana", "NAdam")[1]
    assert "NAdam" not in chosen("dana", "Adam")[1]
