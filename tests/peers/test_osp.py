"""OSP: what is important is averaged at once, the rest beside the next gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.peer.allreduce import AllReduce
from paceline.protocols.peer.osp import OSP
from support.peers import TENSORS, Crew
from support.problems import SIZE, MakeOptimizer, adam, large_batch, momentum, noisy, sgd

close = torch.testing.assert_close
seeds = st.integers(0, 99)
shares = st.sampled_from([0.2, 0.4, 0.5, 0.8, 1.0])
every_optimizer = pytest.mark.parametrize("optimizer", [sgd, momentum, adam])
CUTS = st.sampled_from([(2, 1, 3), (1, 1, 1, 1, 1, 1), (5, 1), (6,)])


def osp(overlap: float = 0.5, **more: Any) -> OSP:
    """One that splits the smallest model anew after every iteration."""
    return OSP(**{"overlap": overlap, "ramp": "constant", "rank_every": 1, "small_bytes": 0, **more})


def alike(rank: int, iteration: int, x: Tensor) -> Tensor:
    """The same for everybody, and every tensor is the most important one at times."""
    weights = 1 + torch.arange(SIZE, dtype=torch.float64).roll(iteration)
    return weights * (x - 0.3) + 0.1


def drops(crew: Crew) -> list[tuple[int, ...]]:
    return [worker.me.agreed.later.tensors for worker in crew.living]


# -- what it equals ---------------------------------------------------------------------------------


@every_optimizer
@given(workers=st.integers(1, 4), seed=seeds)
def test_with_nothing_put_off_it_is_allreduce_bit_for_bit(
    optimizer: MakeOptimizer, workers: int, seed: int
) -> None:
    ours, theirs = (
        Crew(protocol, workers, noisy(seed), seed=seed, optimizer=optimizer).run(8)
        for protocol in (osp(overlap=0.0), AllReduce())
    )
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


@every_optimizer
@given(seed=seeds, share=shares, cut=CUTS, every=st.integers(1, 4), preview=st.sampled_from(["local", "ema"]))
def test_one_worker_trains_as_plain_pytorch_bit_for_bit_for_any_split(
    optimizer: MakeOptimizer, seed: int, share: float, cut: Sequence[int], every: int, preview: str
) -> None:
    """Also the optimizer's memory: were a step remembered twice, momentum and Adam would tell."""
    protocol = osp(share, rank_every=every, preview=preview)
    crew = Crew(protocol, 1, noisy(seed), seed=seed, optimizer=optimizer, tensors=cut).run(11)
    assert torch.equal(crew.parameters()[0], large_batch(1, 11, noisy(seed), optimizer))
    assert torch.equal(crew.settle().models()[0], large_batch(1, 11, noisy(seed), optimizer))


@every_optimizer
@given(workers=st.sampled_from([2, 4]), share=shares, cut=CUTS)
def test_workers_with_equal_gradients_train_as_one_does(
    optimizer: MakeOptimizer, workers: int, share: float, cut: Sequence[int]
) -> None:
    crew = Crew(osp(share), workers, alike, optimizer=optimizer, tensors=cut).run(9)
    for x in crew.parameters():
        close(x, large_batch(1, 9, alike, optimizer), rtol=1e-12, atol=1e-12)


@given(seed=seeds)
def test_one_worker_follows_a_schedule_of_learning_rates(seed: int) -> None:
    """What was put off is applied with the rate of the iteration that computed it."""

    def rate(iteration: int) -> float:
        return 0.2 / (1 + iteration)

    ours, theirs = (
        Crew(protocol, 1, noisy(seed), optimizer=momentum, rate=rate).run(9)
        for protocol in (osp(0.8), AllReduce())
    )
    assert torch.equal(ours.settle().models()[0], theirs.parameters()[0])


@given(workers=st.integers(1, 4), seed=seeds)
def test_everything_put_off_without_preview_is_sgd_delayed_by_one_step(workers: int, seed: int) -> None:
    """By an independent loop: x[t+1] = x[t] - lr * mean gradient at x[t-1]; the first iteration is BSP."""
    x = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    late: Tensor | None = None
    for t in range(8):
        mean = torch.stack([noisy(seed)(rank, t, x) for rank in range(workers)]).mean(0)
        if t == 0:
            x = x - 0.1 * mean
            continue
        if late is not None:
            x = x - 0.1 * late
        late = mean
    crew = Crew(osp(1.0, preview="none"), workers, noisy(seed), seed=seed).run(8)
    for model in crew.models():
        close(model, x)


# -- what it promises --------------------------------------------------------------------------------


@given(workers=st.integers(1, 5), seed=seeds, share=shares, cut=CUTS, iterations=st.integers(1, 12))
def test_after_the_end_every_gradient_of_everybody_was_applied_exactly_once(
    workers: int, seed: int, share: float, cut: Sequence[int], iterations: int
) -> None:
    total = torch.zeros(SIZE, dtype=torch.float64)

    def counted(rank: int, iteration: int, x: Tensor) -> Tensor:
        gradient = noisy(seed)(rank, iteration, x)
        total.add_(gradient)
        return gradient

    crew = Crew(osp(share), workers, counted, seed=seed, tensors=cut).run(iterations).settle()
    start = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    for x in crew.parameters():
        close(x, start - 0.1 / workers * total)
    assert crew.equal()


@every_optimizer
@given(workers=st.integers(2, 5), seed=seeds, share=shares)
def test_the_agreed_model_and_the_split_are_the_same_on_all_at_any_time(
    optimizer: MakeOptimizer, workers: int, seed: int, share: float
) -> None:
    crew = Crew(osp(share), workers, noisy(seed), seed=seed, optimizer=optimizer)
    for _ in range(8):
        models = crew.run(1).models()
        assert all(torch.equal(models[0], model) for model in models)
        assert len(set(drops(crew))) == 1
    states = [worker.optimizer.state_dict()["state"] for worker in crew.settle().living]
    for index, first in states[0].items():
        for name, value in first.items():
            others = [torch.as_tensor(state[index][name]) for state in states]
            assert all(torch.equal(torch.as_tensor(value), other) for other in others if value is not None)


@given(workers=st.integers(2, 4), seed=seeds, share=shares)
def test_a_replica_is_ahead_only_in_what_is_under_way_and_by_its_own_gradient(
    workers: int, seed: int, share: float
) -> None:
    """Its distance from the agreed value to come is lr times how far its gradient is from the mean."""
    last: dict[int, Tensor] = {}

    def seen(rank: int, iteration: int, x: Tensor) -> Tensor:
        last[rank] = noisy(seed)(rank, iteration, x)
        return last[rank]

    crew = Crew(osp(share, rank_every=3), workers, seen, seed=seed).run(4)
    base, later = crew.models()[0], set(drops(crew)[0])
    mean = torch.stack(list(last.values())).mean(0)
    for worker, x in zip(crew.living, crew.parameters(), strict=True):
        cuts = zip(*(v.split(list(TENSORS)) for v in (x, base, last[worker.me.rank], mean)), strict=True)
        for tensor, (mine, agreed, own, common) in enumerate(cuts):
            if tensor not in later:
                assert torch.equal(mine, agreed)
                continue
            distance = (mine - (agreed - 0.1 * common)).norm()
            close(distance, 0.1 * (own - common).norm())


@given(seed=seeds, share=st.floats(0, 1), cut=CUTS)
def test_what_is_put_off_fits_into_the_budget_and_with_the_rest_is_everything(
    seed: int, share: float, cut: Sequence[int]
) -> None:
    crew = Crew(osp(share), 2, noisy(seed), seed=seed, tensors=cut)
    for _ in range(4):
        agreed = crew.run(1).living[0].me.agreed
        assert sorted(agreed.later.tensors + agreed.now.tensors) == list(range(len(cut)))
        assert agreed.later.size_bytes == sum(8 * cut[i] for i in agreed.later.tensors) <= share * 8 * SIZE
        assert agreed.later.size_bytes + agreed.now.size_bytes == 8 * SIZE


def test_the_least_important_tensors_are_put_off() -> None:
    """A tensor's importance is its mean |parameter x gradient|."""

    def gradient(rank: int, iteration: int, x: Tensor) -> Tensor:
        return torch.tensor([5.0, 5.0, 0.1, 1.0, 1.0, 1.0], dtype=torch.float64) / x

    crew = Crew(osp(0.7), 2, gradient).run(1)
    assert drops(crew) == [(1, 2)] * 2
    assert drops(Crew(osp(0.4), 2, gradient).run(1)) == [(1,)] * 2
    assert drops(Crew(osp(0.7, small_bytes=9), 2, gradient).run(1)) == [(2,)] * 2


@given(seed=seeds, share=shares)
def test_at_most_one_exchange_is_under_way_and_every_stage_moves_every_tensor_once(
    seed: int, share: float
) -> None:
    crew = Crew(osp(share), 3, noisy(seed), seed=seed).run(9)
    for rank in range(3):
        kinds = [kind for who, _, kind in crew.log if who == rank and kind in ("Start", "Wait")]
        assert kinds[::2] == ["Start"] * len(kinds[::2])
        assert kinds[1::2] == ["Wait"] * len(kinds[1::2])
    assert crew.sent == dict.fromkeys(range(3), 9 * 8 * SIZE)


# -- how much is put off ------------------------------------------------------------------------------


def test_the_share_grows_with_the_iterations() -> None:
    crew = Crew(osp(1.0, ramp="linear", ramp_length=6), 2, noisy(0), tensors=(1,) * 6)
    assert [len(drops(crew.run(1))[0]) for _ in range(8)] == [1, 2, 3, 4, 5, 6, 6, 6]


def test_the_share_grows_as_the_reported_loss_falls_and_the_loss_has_to_be_reported() -> None:
    losses = [4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 3.0, 5.0, 9.0, 9.0]
    crew = Crew(
        osp(1.0, ramp="loss", ramp_length=2),
        2,
        noisy(0),
        tensors=(1,) * 6,
        loss=lambda rank, iteration: losses[iteration - 1] if iteration else None,
    )
    assert [len(drops(crew.run(1))[0]) for _ in range(10)] == [0, 0, 0, 0, 3, 3, 4, 4, 0, 0]
    with pytest.raises(ConfigError, match=r"pace.report\(loss=...\)"):
        Crew(osp(ramp="loss", ramp_length=1), 2, noisy(0), loss=lambda rank, iteration: None).run(2)


def test_what_comes_too_late_is_put_off_less() -> None:
    """In the tests' driver whoever comes first has to wait, and the share shrinks; alone nobody waits."""
    measured = osp(1.0, budget="measured", rank_every=5)
    crew = Crew(measured, 3, noisy(0), tensors=(1,) * 6).run(40)
    assert crew.living[0].me.agreed.room < 1.0
    alone = Crew(measured, 1, noisy(0), tensors=(1,) * 6).run(40)
    assert alone.living[0].me.agreed.room == 1.0


class Times:
    """A clock that moves by what computing, averaging and waiting take, in the order a rank asks for it."""

    def __init__(self, crew: Crew, compute_s: float, average_s: float, wait_s: float = 0.0) -> None:
        self.crew, self.now = crew, {worker.me.rank: 0.0 for worker in crew.workers}
        self.takes = {"Compute": compute_s, "Average": average_s, "Wait": wait_s}
        self.read: dict[int, int] = {}

    def __call__(self, rank: int) -> float:
        new = self.crew.log[self.read.get(rank, 0) :]
        self.read[rank] = len(self.crew.log)
        self.now[rank] += sum(self.takes.get(name, 0.0) for who, _, name in new if who == rank)
        return self.now[rank]


def timed(workers: int, *takes: float, overlap: float = 1.0, late: bool = False) -> Crew:
    """A crew of six tensors of one size; `late`: what was put off is never there in time."""
    protocol = osp(overlap, budget="times", rank_every=2)
    travel = (lambda rank, lane: 9) if late else (lambda rank, lane: 0)
    crew = Crew(protocol, workers, alike, tensors=(1,) * 6, travel=travel)
    crew.clock = Times(crew, *takes)
    return crew


@pytest.mark.parametrize(
    ("compute_s", "average_s", "overlap", "put_off"),
    [(1.0, 1.8, 1.0, 3), (1.0, 1.81, 1.0, 2), (1.0, 0.1, 0.7, 4), (1.0, 0.0, 1.0, 6), (0.1, 9.0, 1.0, 0)],
)
def test_what_is_put_off_is_nine_tenths_of_what_travels_while_all_compute(
    compute_s: float, average_s: float, overlap: float, put_off: int
) -> None:
    """min(overlap, 0.9 x computing / averaging) of the model, from its tensors of a sixth each."""
    crew = timed(1, compute_s, average_s, overlap=overlap).run(2)
    assert [len(each) for each in drops(crew)] == [put_off]


def test_the_time_to_average_everything_is_scaled_up_from_the_part_that_was() -> None:
    """After the first ranking half is put off; averaging the other half takes half as long."""
    crew = timed(1, 1.0, 1.8).run(2)
    crew.clock.takes["Average"] = 0.9  # type: ignore[attr-defined]
    assert [len(each) for each in drops(crew.run(4))] == [3]


def test_who_computes_longest_and_who_came_last_to_the_average_count() -> None:
    crew = timed(2, 1.0, 1.8)
    fast = Times(crew, 0.2, 5.0)  # it computes little, and waits for the other
    slow = crew.clock
    crew.clock = lambda rank: (slow, fast)[rank](rank)
    assert [len(each) for each in drops(crew.run(2))] == [3, 3]


@pytest.mark.parametrize(
    ("wait_s", "late", "room"), [(0.04, True, 0.9), (0.01, True, 1.0), (0.04, False, 1.0)]
)
def test_less_is_put_off_while_workers_wait_for_more_than_a_hundredth_of_computing(
    wait_s: float, late: bool, room: float
) -> None:
    """Of two iterations between rankings both wait: 0.04 s on the mean is more, 0.01 s is not."""
    crew = timed(1, 1.0, 1.8, wait_s, late=late).run(4)
    assert crew.living[0].me.agreed.room == room


def test_room_grows_back_while_nobody_waits_and_not_beyond_the_formula() -> None:
    crew = timed(1, 1.0, 1.8).run(2)
    crew.living[0].me.agreed.room = 0.9
    assert crew.run(2).living[0].me.agreed.room == pytest.approx(0.9 * 1.02)
    assert crew.run(20).living[0].me.agreed.room == 1.0


@every_optimizer
@given(seed=seeds)
def test_with_measured_times_too_one_worker_trains_as_plain_pytorch(
    optimizer: MakeOptimizer, seed: int
) -> None:
    protocol = osp(1.0, budget="times", rank_every=2)
    crew = Crew(protocol, 1, noisy(seed), optimizer=optimizer, travel=lambda rank, lane: 9)
    crew.clock = Times(crew, 1.0, 1.8, 0.1)
    close(crew.run(9).settle().parameters()[0], large_batch(1, 9, noisy(seed), optimizer))


@given(seed=seeds, decay=st.sampled_from([0.0, 0.5, 0.9]))
def test_the_guess_of_ema_is_the_own_gradient_moved_by_the_running_difference_to_the_mean(
    seed: int, decay: float
) -> None:
    """Everything is put off, and gradients are given in advance: the replica is the agreed model, which has
    the means of all iterations but the last, and the guess of the last."""

    def given_in_advance(rank: int, iteration: int, x: Tensor) -> Tensor:
        return noisy(seed)(rank, iteration, torch.zeros_like(x))

    crew = Crew(osp(1.0, preview="ema", ema_decay=decay), 3, given_in_advance, seed=seed).run(7)
    zero = torch.zeros(SIZE, dtype=torch.float64)
    drawn = [torch.stack([given_in_advance(rank, t, zero) for rank in range(3)]) for t in range(7)]
    apart = torch.zeros(3, SIZE, dtype=torch.float64)
    for t in range(1, 6):  # the first iteration is not put off, the last is still under way
        apart = decay * apart + (1 - decay) * (drawn[t].mean(0) - drawn[t])
    for rank, (x, model) in enumerate(zip(crew.parameters(), crew.models(), strict=True)):
        close(x, model - 0.1 * (drawn[6][rank] + apart[rank]))


def test_where_gradients_differ_by_a_constant_the_guess_of_ema_comes_to_the_mean() -> None:
    def steady(rank: int, iteration: int, x: Tensor) -> Tensor:
        return torch.full_like(x, float(rank))

    crew = Crew(osp(1.0, preview="ema", ema_decay=0.5), 3, steady).run(40)
    for x in crew.parameters():
        close(x, crew.mean(), rtol=0, atol=1e-9)


@given(seed=seeds)
def test_the_preview_ends_where_it_is_told_to(seed: int) -> None:
    crew = Crew(osp(1.0, preview_until=3), 2, noisy(seed), seed=seed).run(7)
    previews = {iteration for _, iteration, kind in crew.log if kind == "Preview"}
    assert previews == {1, 2}


def test_the_preview_keeps_nearer_to_allreduce_than_none() -> None:
    """Early in training, with unequal data: what the correction is for."""
    reference = large_batch(4, 20, noisy(5), momentum)
    apart = []
    for preview in ("local", "none"):
        crew = Crew(osp(1.0, preview=preview), 4, noisy(5), optimizer=momentum).run(20).settle()
        apart.append(float((crew.models()[0] - reference).norm()))
    assert apart[0] < 0.5 * apart[1]


# -- trouble ------------------------------------------------------------------------------------------


@given(seed=seeds, dies=st.integers(0, 9), share=shares)
def test_the_others_go_on_and_settle_when_one_dies(seed: int, dies: int, share: float) -> None:
    crew = Crew(osp(share), 3, noisy(seed), seed=seed, optimizer=adam).run(10, dies={1: dies}).settle()
    assert len(crew.living) == 2
    assert crew.equal()


def test_float_buffers_are_averaged_at_the_end() -> None:
    crew = Crew(osp(), 2, noisy(0), buffers=lambda rank: torch.full((2,), float(rank))).run(3).settle()
    assert [worker.buffers[0].tolist() for worker in crew.living] == [[0.5, 0.5]] * 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"overlap": 1.5}, "got 1.5"),
        ({"overlap": -0.1}, "got -0.1"),
        ({"rank_every": 0}, "200 and 0"),
        ({"small_bytes": -1}, "0 and -1"),
        ({"ema_decay": 1.0}, "ema_decay .* got 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OSP(**settings)
