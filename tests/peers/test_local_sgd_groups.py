"""Hierarchical local SGD: groups average often, all of them seldom."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.peer.local_sgd import LocalSGD
from support.peers import Crew
from support.problems import SIZE, momentum, noisy, nothing

close = torch.testing.assert_close
seeds = st.integers(0, 99)


def drawn(rank: int) -> Tensor:
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


@given(
    workers=st.integers(2, 5),
    seed=seeds,
    size=st.integers(2, 3),
    inner=st.integers(1, 3),
    period=st.integers(1, 6),
    by_samples=st.booleans(),
)
def test_groups_and_all_average_when_a_plain_loop_does(
    workers: int, seed: int, size: int, inner: int, period: int, by_samples: bool
) -> None:
    def samples(rank: int, iteration: int) -> int:
        return 1 + (rank + iteration) % 3

    size = min(size, workers)
    protocol = LocalSGD(period=period, group_size=size, group_period=inner, by_samples=by_samples)
    crew = Crew(protocol, workers, noisy(seed), seed=seed, samples=samples).run(13)
    xs = [torch.linspace(-1, 1, SIZE, dtype=torch.float64) for _ in range(workers)]
    own, whole = [0] * workers, [0] * workers
    for t in range(1, 14):
        for rank, x in enumerate(xs):
            x -= 0.1 * noisy(seed)(rank, t - 1, x.clone())
            own[rank] += samples(rank, t - 1)
            whole[rank] += samples(rank, t - 1)
        groups = [range(start, min(start + size, workers)) for start in range(0, workers, size)]
        if t % period == 0:
            groups, own = [range(workers)], whole
        elif (t % period) % inner:
            continue
        for group in groups:
            weights = [own[rank] if by_samples else 1 for rank in group]
            mean = sum(w * xs[rank] for w, rank in zip(weights, group, strict=True)) / sum(weights)
            for rank in group:
                xs[rank] = torch.as_tensor(mean).clone()
        own = [0] * workers
        whole = [0] * workers if t % period == 0 else whole
    for ours, theirs in zip(crew.parameters(), xs, strict=True):
        close(ours, theirs)


def test_within_a_group_samples_count_since_its_last_averaging_only() -> None:
    """Rank 0 has 3 samples to 1 in the first iteration, then 1 to 1: the second mean is the plain one."""

    def samples(rank: int, iteration: int) -> int:
        return 3 if (rank, iteration) == (0, 0) else 1

    def given(rank: int, iteration: int, x: Tensor) -> Tensor:
        return torch.full_like(x, float(rank))

    protocol = LocalSGD(period=9, group_size=2, by_samples=True)
    x = Crew(protocol, 2, given, samples=samples).run(2).parameters()[0]
    close(x, torch.linspace(-1, 1, SIZE, dtype=torch.float64) - 0.1 * (1 / 4 + 1 / 2))


def test_members_are_equal_after_their_averaging_and_all_after_that_of_all() -> None:
    crew = Crew(LocalSGD(period=4, group_size=2, group_period=2), 4, noisy(2), optimizer=momentum).run(2)
    a, b, c, d = crew.parameters()
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    assert not torch.equal(a, c)
    assert not crew.run(1).equal()
    assert crew.run(1).equal()


@given(workers=st.integers(2, 5), size=st.integers(2, 5))
def test_averaging_within_groups_leaves_the_mean_of_all_as_it_was(workers: int, size: int) -> None:
    protocol = LocalSGD(period=99, group_size=min(size, workers))
    crew = Crew(protocol, workers, nothing, initial=drawn)
    for worker in crew.workers:  # replicas differ, and the snapshot is each one's own start
        worker.me.agreed.since = 0
    before = crew.mean()
    close(crew.run(3).mean(), before)


@given(seed=seeds, period=st.integers(1, 3))
def test_one_group_of_all_is_local_sgd_with_the_groups_period(seed: int, period: int) -> None:
    one = Crew(LocalSGD(period=period), 3, noisy(seed), seed=seed).run(12)
    other = Crew(
        LocalSGD(period=4 * period, group_size=3, group_period=period), 3, noisy(seed), seed=seed
    ).run(12)
    for x, y in zip(one.parameters(), other.parameters(), strict=True):
        close(x, y)


def test_float_buffers_are_averaged_within_groups() -> None:
    protocol = LocalSGD(period=9, group_size=2, group_period=1)
    crew = Crew(protocol, 4, noisy(1), buffers=lambda rank: torch.tensor([float(rank)], dtype=torch.float64))
    assert [float(worker.buffers[0]) for worker in crew.run(1).workers] == [0.5, 0.5, 2.5, 2.5]


@given(seed=seeds, dies=st.integers(0, 7))
def test_the_others_go_on_when_a_member_dies(seed: int, dies: int) -> None:
    protocol = LocalSGD(period=4, group_size=2, group_period=1)
    crew = Crew(protocol, 4, noisy(seed), seed=seed).run(8, dies={1: dies})
    assert len(crew.living) == 3
    assert crew.equal()


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"group_size": -1}, "got -1"), ({"group_period": 2}, "got 0 and 2"), ({"group_period": 0}, "and 0")],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LocalSGD(**settings)


@pytest.mark.parametrize("size", [1, 5])
def test_groups_that_do_not_suit_the_workers_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"group_size={size} does not suit 4 workers"):
        LocalSGD(group_size=size).check(4)


def test_by_samples_a_group_weighs_what_was_seen_since_it_was_equal() -> None:
    protocol = LocalSGD(period=4, group_size=2, group_period=2, by_samples=True)
    me = Crew(protocol, 2, noisy(0), samples=lambda rank, iteration: 3 + rank).run(1).workers[1].me
    for weight in (4, 0):
        steps = protocol.average_group(me)
        average: Any = next(steps)
        assert average.weight == weight
        with contextlib.suppress(StopIteration):
            steps.send(average.vector)
