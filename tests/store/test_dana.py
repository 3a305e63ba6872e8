"""DANA on the store: a momentum per worker, and a look-ahead that only workers see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn

from paceline.store.corrections.correction import GradientPart, Stride
from support.corrected import SIZE, Crew, close, noise
from support.reference_dana import ReferenceDana


@examples(max_examples=20)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=12), st.sampled_from([0.5, 0.9]), st.booleans())
def test_one_worker_with_dana_is_torchs_nesterov(seeds: list[int], momentum: float, nesterov: bool) -> None:
    """What it reads is what torch has as parameters; gradients depend on where they are computed."""
    crew = Crew("dana", workers=1, momentum=momentum, nesterov=nesterov)
    ours = crew.flat(crew.copies[0])
    theirs = nn.Parameter(ours.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, nesterov=True)
    for seed in seeds:
        curve = noise(1000).abs()
        crew.push(0, curve * crew.flat(crew.copies[0]) + noise(seed))
        theirs.grad = curve * theirs.detach() + noise(seed)
        optimizer.step()
        close(crew.flat(crew.copies[0]), theirs.detach())


happenings = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 3)),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("flush"), st.sets(st.integers(0, 3), min_size=1)),
        st.tuples(st.just("look"), st.integers(0, 3)),
        st.tuples(st.just("awake"), st.sets(st.integers(0, 3))),
    ),
    max_size=25,
)


@examples(max_examples=20)
@given(happenings, st.sampled_from([0.0, 0.02]))
def test_any_history_is_the_rule_written_down_naively(history: list[Any], decay: float) -> None:
    """Pushes, flushes, waiting, leaving and coming back: weights, look-ahead, and the sum of all momenta."""
    crew = Crew("dana", workers=4, momentum=0.9, weight_decay=decay)
    reference = ReferenceDana(crew.weights, 0.1, 0.9, decay)
    for number, (what, who) in enumerate(history):
        if what == "push":
            parts, scale = [(who, noise(number), 1.0)], 0.25
        elif what == "flush":
            parts = [(rank, noise(100 * number + rank), 1 / len(who)) for rank in sorted(who)]
            scale = len(who) / 4
        elif what == "leave":
            crew.store.forget(who)
            reference.forget(who)
            continue
        elif what == "awake":
            crew.store.awake(frozenset(who))
            reference.asleep = set(range(4)) - who
            continue
        else:
            crew.store.hand_out(crew.copies[who])
            close(crew.flat(crew.copies[who]), reference.ahead())
            continue
        crew.each(parts, Stride(scale, 0.25, 4), parts[0][0])
        reference.step(parts, scale, 0.25)
        close(crew.weights, reference.weights)
        close(crew.flat(crew.copies[parts[0][0]]), reference.ahead())
    assert set(crew.corrections.workers) == set(reference.own)
    crew.store.hand_out(crew.copies[0])
    close(crew.vector(crew.corrections.total), reference.total())


@examples(max_examples=20)
@given(happenings)
def test_with_adam_too_the_sum_is_of_those_who_are_there(history: list[Any]) -> None:
    crew = Crew("dana", "Adam", workers=4)
    for number, (what, who) in enumerate(history):
        if what == "push":
            crew.push(who, noise(number), 4)
        elif what == "flush":
            parts = [(rank, noise(100 * number + rank), 1 / len(who)) for rank in sorted(who)]
            crew.each(parts, Stride(len(who) / 4, 0.25, 4))
        elif what == "leave":
            crew.store.forget(who)
        elif what == "awake":
            crew.store.awake(frozenset(who))
    crew.store.hand_out(crew.copies[0])
    awake = crew.corrections.awake
    momentum, total = crew.corrections._momentum, torch.zeros(SIZE, dtype=torch.float64)
    for rank in crew.corrections.workers if awake is None else awake.intersection(crew.corrections.workers):
        total += momentum.weight(rank, 0) * crew.vector(crew.corrections.own(rank))
    close(crew.vector(crew.corrections.total), total)


@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.1}, {"maximize": True}])
def test_equal_shares_of_all_in_one_flush_are_one_step_of_a_common_momentum(more: Any) -> None:
    """N workers in rounds: lockstep's own numbers, since nobody reads anything in between."""
    crew, lockstep = (Crew(how, momentum=0.9, **more) for how in ("dana", "none"))
    for round_ in range(6):
        gradients = [noise(10 * round_ + rank) for rank in range(3)]
        crew.each([(rank, g, 1 / 3) for rank, g in enumerate(gradients)], Stride(1.0, 1 / 3, 3))
        lockstep.store.apply(lockstep.gradients(sum(gradients) / 3), lockstep.settings, 1.0)
        close(crew.weights, lockstep.weights)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Adam", {}),
        ("Adam", {"weight_decay": 0.1}),
        ("AdamW", {"weight_decay": 0.1}),
        ("Adam", {"maximize": True, "betas": (0.5, 0.9)}),
    ],
)
def test_one_worker_under_adam_moves_the_stores_weights_as_torch_does(name: str, settings: Any) -> None:
    crew = Crew("dana", name, workers=1, **settings)
    theirs = nn.Parameter(crew.weights)
    optimizer = getattr(torch.optim, name)([theirs], lr=0.1, **settings)
    for seed in range(6):
        crew.push(0, noise(seed))
        theirs.grad = noise(seed)
        optimizer.step()
        close(crew.weights, theirs.detach())
        assert not torch.equal(crew.flat(crew.copies[0]), crew.weights)


def test_a_flush_of_all_under_adam_is_torchs_step_with_the_mean() -> None:
    crew, lockstep = Crew("dana", "Adam"), Crew("none", "Adam")
    for round_ in range(5):
        gradients = [noise(10 * round_ + rank) for rank in range(3)]
        crew.each([(rank, g, 1 / 3) for rank, g in enumerate(gradients)], Stride(1.0, 1 / 3, 3))
        lockstep.store.apply(lockstep.gradients(sum(gradients) / 3), lockstep.settings, 1.0)
        close(crew.weights, lockstep.weights)


def test_the_second_moment_forgets_as_much_in_a_round_of_pushes_as_in_one_step() -> None:
    """Beta2 is counted per push: four workers decay it together as lockstep would once."""
    crew = Crew("dana", "Adam", workers=4, betas=(0.9, 0.8))
    for rank in range(4):
        crew.push(rank, torch.ones(SIZE, dtype=torch.float64), 4)
    second = crew.vector(crew.corrections._shared["second"])
    close(second, torch.full((SIZE,), 1 - 0.8, dtype=torch.float64))


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_the_stores_weights_never_contain_the_look_ahead(name: str) -> None:
    """Whoever looks, and how often: gradients being equal, the weights are, bit for bit."""
    settings = {"momentum": 0.9} if name == "SGD" else {}
    quiet, curious = (Crew("dana", name, **settings) for _ in range(2))
    for number in range(9):
        quiet.each([(number % 3, noise(number), 1.0)], Stride(1 / 3, 1 / 3, 3))
        curious.push(number % 3, noise(number), 3)
        for copy in curious.copies.values():
            curious.store.hand_out(copy)
            assert not torch.equal(curious.flat(copy), curious.weights)
    assert torch.equal(quiet.weights, curious.weights)
    curious.store.copy_weights(curious.copies[0])
    assert torch.equal(curious.flat(curious.copies[0]), curious.weights)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_who_comes_back_begins_as_somebody_new(name: str) -> None:
    settings = {"momentum": 0.9} if name == "SGD" else {}
    same, other = (Crew("dana", name, workers=4, **settings) for _ in range(2))
    for crew, comes in ((same, 0), (other, 3)):
        for number in range(6):
            crew.push(number % 3, noise(number), 3)
        crew.store.forget(0)
        for number in range(4):
            crew.push(comes, noise(10 + number), 3)
    assert torch.equal(same.weights, other.weights)
    close(same.flat(same.copies[0]), other.flat(other.copies[3]))


def test_a_gradient_of_somebody_who_has_left_counts_and_its_momentum_is_not_kept() -> None:
    crew = Crew("dana", momentum=0.9)
    for rank in range(3):
        crew.push(rank, noise(rank), 3)
    crew.store.forget(1)
    parts = [
        GradientPart(1, crew.gradients(noise(7)), 0.5, gone=True),
        GradientPart(2, crew.gradients(noise(8)), 0.5),
    ]
    before, own = crew.weights, crew.vector(crew.corrections.own(2)).clone()
    crew.store.apply_each(parts, crew.settings, Stride(1.0, 0.5, 2), [crew.copies[0]])
    close(crew.weights, before - 0.1 * (0.5 * noise(7) + 0.5 * (0.9 * own + noise(8))))
    assert crew.corrections.workers == [0, 2]
    total = crew.vector(crew.corrections.own(0)) + crew.vector(crew.corrections.own(2))
    close(crew.flat(crew.copies[0]), crew.weights - 0.1 * 0.5 * 0.9 * total)


def test_a_parameter_without_a_gradient_is_neither_moved_nor_decayed() -> None:
    crew = Crew("dana", momentum=0.9, weight_decay=0.1)
    crew.push(0, noise(0))
    before = crew.weights
    gradients = crew.gradients(noise(1))
    gradients.missing = frozenset({1})
    part = GradientPart(0, gradients, 1.0)
    crew.store.apply_each([part], crew.settings, Stride(1.0, 1.0, 1), [crew.copies[0]])
    assert torch.equal(crew.weights[15:22], before[15:22])
    assert not torch.equal(crew.weights[:15], before[:15])
    own = crew.vector(crew.corrections.own(0))
    close(crew.flat(crew.copies[0]), crew.weights - 0.1 * 0.9 * own)


def test_clipping_is_of_the_gradient_and_not_of_the_momentum() -> None:
    crew, same = Crew("dana", momentum=0.9), Crew("dana", momentum=0.9)
    for number in range(4):
        crew.each([(0, noise(number), 1.0)], Stride(1.0, 1.0, 1, 0.25))
        same.each([(0, noise(number) * 0.25, 1.0)], Stride(1.0, 1.0, 1))
    close(crew.weights, same.weights)


@pytest.mark.parametrize("pushes", [[0], [0, 1, 2], [2, 2, 0, 1, 0, 2]], ids=len)
def test_under_adam_a_worker_reads_the_weights_moved_by_everybodys_first_moment(pushes: list[int]) -> None:
    """Adam with one first moment for each worker, written down naively."""
    betas, lr, eps, active = (0.7, 0.8), 0.1, 1e-3, 3
    crew = Crew("dana", "Adam", workers=3, betas=betas, eps=eps)
    weights, second, forgotten = crew.weights, torch.zeros(SIZE, dtype=torch.float64), 1.0
    first, counts = {rank: torch.zeros_like(second) for rank in range(3)}, dict.fromkeys(range(3), 0)
    kept = betas[1] ** (1 / active)
    for number, rank in enumerate(pushes):
        crew.push(rank, noise(number), active)
        counts[rank] += 1
        first[rank] = betas[0] * first[rank] + (1 - betas[0]) * noise(number)
        second, forgotten = kept * second + (1 - kept) * noise(number) ** 2, forgotten * kept
        root = (second / (1 - forgotten)).sqrt() + eps
        unbiased = {each: first[each] / (1 - betas[0] ** n) for each, n in counts.items() if n}
        weights = weights - lr / active * unbiased[rank] / root
        close(crew.weights, weights)
        close(crew.flat(crew.copies[rank]), weights - lr / active * betas[0] * sum(unbiased.values()) / root)


def test_under_adam_a_worker_that_comes_before_the_first_step_reads_the_weights() -> None:
    crew = Crew("dana", "Adam", workers=1)
    crew.copies[0].zero_()
    crew.store.hand_out(crew.copies[0])
    close(crew.flat(crew.copies[0]), crew.weights)
