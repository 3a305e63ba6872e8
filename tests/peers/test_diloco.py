"""DiLoCo in fragments and with a delay, against a plain second writing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.core.parts import Part
from paceline.protocols.peer.diloco import DiLoCo, fragments_of
from paceline.protocols.peer.hpsgd import HPSGD
from paceline.protocols.rules.compression import check_family
from paceline.protocols.rules.steady import check_steady
from support.peers import TENSORS, Crew
from support.problems import SIZE, adam, momentum, noisy

close = torch.testing.assert_close
seeds = st.integers(0, 99)
BYTES = tuple(8 * count for count in TENSORS)


def elements(fragment: int, fragments: int) -> slice:
    """Where a fragment lies in the crew's vectors."""
    tensors = fragments_of(BYTES, fragments)[fragment].tensors
    return slice(sum(TENSORS[: tensors[0]]), sum(TENSORS[: tensors[-1] + 1]))


def by_hand(
    protocol: DiLoCo, workers: int, iterations: int, seed: int, samples: Any, over: bool = False
) -> list[Tensor]:
    """SGD at rate 0.1, every fragment as the paper has it; a round's delay as HPSGD has it.

    `over`: the run has ended, so what is under way is applied and what was done since is added to it.
    """
    theta = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    v = torch.zeros(SIZE, dtype=torch.float64)
    replicas, flying = [theta.clone() for _ in range(workers)], []
    base = [theta.clone() for _ in range(workers)]
    seen, gone = [0] * workers, [[0] * workers for _ in range(protocol.fragments)]
    for t in range(1, iterations + 1):
        for rank, x in enumerate(replicas):
            x -= 0.1 * noisy(seed)(rank, t - 1, x.clone())
            seen[rank] += samples(rank, t - 1)
        turn = t * protocol.fragments / protocol.period
        mean, here, launched = None, slice(0), 0
        if turn == int(turn):
            launched = (int(turn) - 1) % protocol.fragments
            here = elements(launched, protocol.fragments)
            weights = [1.0] * workers
            if protocol.weights == "samples":
                weights = [float(n - m) for n, m in zip(seen, gone[launched], strict=True)]
            gone[launched] = list(seen)
            moved = [w * (b - x)[here] for w, b, x in zip(weights, base, replicas, strict=True)]
            mean = torch.stack(moved).sum(0) / sum(weights)
        if mean is not None:
            flying.append((t + protocol.delay, here, mean))
        for due, where, delta in [each for each in flying if each[0] == t]:
            v[where] = protocol.momentum * v[where] + delta
            theta[where] -= protocol.lr * (delta + protocol.momentum * v[where])
            for x, b in zip(replicas, base, strict=True):
                x[where] = (1 - protocol.alpha) * theta[where] + protocol.alpha * x[where]
                b[where] = theta[where]
            flying = [each for each in flying if each[0] != due or each[1] != where]
        if mean is not None and protocol.delay:
            for x, b in zip(replicas, base, strict=True):
                b[here] = x[here]
    for _, where, delta in flying if over else []:
        v[where] = protocol.momentum * v[where] + delta
        theta[where] -= protocol.lr * (delta + protocol.momentum * v[where])
        for x, b in zip(replicas, base, strict=True):
            x[where] = theta[where] + (x[where] - b[where])
    return replicas


@st.composite
def protocols(draw: Any) -> DiLoCo:
    fragments = draw(st.integers(1, 3))
    period = fragments * draw(st.integers(1, 3))
    delay = draw(st.integers(0, period))
    return DiLoCo(
        period=period,
        lr=0.7,
        momentum=draw(st.sampled_from([0.0, 0.9])),
        weights=draw(st.sampled_from(["uniform", "samples"])),
        fragments=fragments,
        delay=delay,
        alpha=0.0 if delay == period else draw(st.sampled_from([0.0, 0.25])),
    )


def samples(rank: int, iteration: int) -> int:
    return 1 + (rank + iteration) % 3


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(
    ("fragments", "period", "delay", "alpha"),
    [
        (1, 2, 1, 0.0),
        (1, 2, 1, 0.25),
        (1, 3, 0, 0.25),
        (1, 2, 2, 0.0),
        (3, 3, 2, 0.0),
        (2, 4, 3, 0.25),
        (3, 3, 3, 0.0),
    ],
)
def test_after_many_rounds_replicas_are_those_of_a_plain_loop(
    fragments: int, period: int, delay: int, alpha: float, weights: Any
) -> None:
    protocol = DiLoCo(period, weights=weights, fragments=fragments, delay=delay, alpha=alpha)
    crew = Crew(protocol, 3, noisy(4), samples=samples).run(13)
    for ours, theirs in zip(crew.parameters(), by_hand(protocol, 3, 13, 4, samples), strict=True):
        close(ours, theirs)


@given(protocol=protocols(), workers=st.integers(1, 3), seed=seeds, iterations=st.integers(1, 14))
def test_fragments_delay_and_alpha_do_what_a_plain_loop_does(
    protocol: DiLoCo, workers: int, seed: int, iterations: int
) -> None:
    crew = Crew(protocol, workers, noisy(seed), seed=seed, samples=samples).run(iterations)
    for ours, theirs in zip(
        crew.parameters(), by_hand(protocol, workers, iterations, seed, samples), strict=True
    ):
        close(ours, theirs)


@pytest.mark.parametrize(
    ("fragments", "period", "delay", "alpha", "iterations"),
    [
        (1, 4, 2, 0.0, 9),  # one iteration after an average was sent off
        (1, 4, 3, 0.25, 10),
        (1, 3, 3, 0.0, 11),
        (2, 4, 3, 0.25, 13),  # with both fragments under way
        (3, 3, 2, 0.0, 8),
        (2, 4, 0, 0.25, 7),  # with nothing under way
    ],
)
def test_final_weights_are_what_was_under_way_and_what_was_done_since(
    fragments: int, period: int, delay: int, alpha: float, iterations: int
) -> None:
    protocol = DiLoCo(period, fragments=fragments, delay=delay, alpha=alpha)
    crew = Crew(protocol, 3, noisy(4), samples=samples).run(iterations)
    before = crew.parameters()
    after = crew.settle().parameters()
    for ours, theirs in zip(after, by_hand(protocol, 3, iterations, 4, samples, over=True), strict=True):
        close(ours, theirs)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)) is (delay == 0)


@given(seed=seeds, fragments=st.integers(1, 3))
def test_after_its_turn_a_fragment_is_the_same_on_all_and_the_others_are_not(
    seed: int, fragments: int
) -> None:
    protocol = DiLoCo(period=2 * fragments, fragments=fragments)
    crew = Crew(protocol, 3, noisy(seed), seed=seed, optimizer=adam)
    for turn in range(2 * fragments):
        first, second, _ = crew.run(2).parameters()
        here = elements(turn % fragments, fragments)
        assert torch.equal(first[here], second[here])
        assert torch.equal(first, second) is (fragments == 1)


@given(protocol=protocols(), seed=seeds)
def test_in_a_period_every_worker_sends_the_whole_model_once(protocol: DiLoCo, seed: int) -> None:
    crew = Crew(protocol, 2, noisy(seed), seed=seed).run(3 * protocol.period)
    assert crew.sent == {0: 3 * 8 * SIZE, 1: 3 * 8 * SIZE}
    assert crew.counts["average"] == 3 * protocol.fragments


@given(protocol=protocols(), seed=seeds, iterations=st.integers(1, 12))
def test_snapshot_and_outer_momentum_are_the_same_on_all_at_any_time(
    protocol: DiLoCo, seed: int, iterations: int
) -> None:
    crew = Crew(protocol, 3, noisy(seed), seed=seed, optimizer=momentum).run(iterations).settle()
    memories: list[Any] = [worker.me.agreed for worker in crew.workers]
    for memory in memories[1:]:
        assert torch.equal(memory.snapshot.parts[0], memories[0].snapshot.parts[0])
        if memory.momentum is not None:
            assert torch.equal(memory.momentum.parts[0], memories[0].momentum.parts[0])


@given(workers=st.integers(1, 4), seed=seeds, period=st.integers(1, 4), iterations=st.integers(1, 14))
def test_a_delay_of_a_period_with_a_plain_outer_step_is_hpsgd(
    workers: int, seed: int, period: int, iterations: int
) -> None:
    ours = Crew(DiLoCo(period=period, lr=1.0, momentum=0.0, delay=period), workers, noisy(seed), seed=seed)
    theirs = Crew(HPSGD(round_length=period), workers, noisy(seed), seed=seed)
    for x, y in zip(ours.run(iterations).parameters(), theirs.run(iterations).parameters(), strict=True):
        close(x, y)
    close(ours.settle().mean(), theirs.settle().models()[0])


@given(protocol=protocols(), seed=seeds, dies=st.integers(0, 9))
def test_the_others_go_on_and_settle_when_one_dies(protocol: DiLoCo, seed: int, dies: int) -> None:
    crew = Crew(protocol, 3, noisy(seed), seed=seed).run(10, dies={1: dies}).settle()
    assert len(crew.living) == 2
    assert all(bool(x.isfinite().all()) for x in crew.parameters())


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("delay", [0, 1])
def test_float_buffers_are_averaged_once_per_period(fragments: int, delay: int) -> None:
    protocol = DiLoCo(period=2, fragments=fragments, delay=delay)
    crew = Crew(protocol, 3, noisy(1), buffers=lambda rank: torch.tensor([float(rank)], dtype=torch.float64))
    assert [float(worker.buffers[0]) for worker in crew.run(1).workers] == [0.0, 1.0, 2.0]
    assert [float(worker.buffers[0]) for worker in crew.run(1).workers] == pytest.approx([1.0, 1.0, 1.0])


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=12), data=st.data())
def test_fragments_are_all_tensors_in_order_and_none_is_empty(sizes: list[int], data: Any) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    parts = fragments_of(tuple(sizes), count)
    assert [tensor for part in parts for tensor in part.tensors] == list(range(len(sizes)))
    assert len(parts) == count
    assert all(part.tensors and part.size_bytes == sum(sizes[t] for t in part.tensors) for part in parts)


def test_fragments_of_equal_tensors_are_equal() -> None:
    assert fragments_of((8,) * 6, 3) == tuple(Part((i, i + 1), 16) for i in (0, 2, 4))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"period": 10, "fragments": 4}, "period=10, fragments=4"),
        ({"fragments": 0}, "fragments=0"),
        ({"period": 4, "delay": 5}, "got 5 with period=4"),
        ({"period": 4, "delay": -1}, "got -1"),
        ({"alpha": 1.0}, "alpha=1"),
        ({"period": 4, "delay": 4, "alpha": 0.5}, "alpha=0.5, delay=4"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DiLoCo(**settings)


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match="this one has 3, fewer than fragments=4"):
        Crew(DiLoCo(period=4, fragments=4), 2, noisy(1)).run(1)


def test_with_a_delay_it_is_never_at_rest_for_a_checkpoint_and_without_one_it_is() -> None:
    check_steady("100", "diloco", DiLoCo(period=4, fragments=2))
    with pytest.raises(ConfigError, match="'diloco' as it is set has vectors under way"):
        check_steady("100", "diloco", DiLoCo(period=4, delay=1))


def test_who_delays_an_outer_step_with_momentum_by_a_round_is_told_that_it_overshoots() -> None:
    """And it does: towards the optimum of a quadratic, from both sides of the remark."""

    def far(protocol: DiLoCo) -> float:
        crew = Crew(protocol, 2, lambda rank, i, x: x).run(60)
        return float(crew.mean().norm())

    late = DiLoCo(period=5, delay=5)
    assert "overshoot" in late.remarks(2)[0]
    for calm in (DiLoCo(period=5), DiLoCo(period=5, delay=4), DiLoCo(period=5, delay=5, momentum=0.5)):
        assert not calm.remarks(2)
        assert far(calm) < far(late)


def test_fragments_are_not_factorised_together() -> None:
    check_family("powersgd:2", "diloco", DiLoCo(period=4))
    with pytest.raises(ConfigError, match="averages some tensors now and others later"):
        check_family("powersgd:2", "diloco", DiLoCo(period=4, fragments=2))
