"""Buckets: every gradient once, last parameters first; what changed after it was sent is found out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.fabric.collective import GroupLine
from paceline.runtime.peer.collective.buckets import Buckets, plan
from paceline.runtime.peer.collective.slab import Slab, pack
from paceline.store.layout import describe
from paceline.store.replicas import gradient_parts


class Net(nn.Module):
    """Two dtypes, many sizes, and a parameter that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.ModuleList(nn.Linear(n, n) for n in (3, 20, 7, 40))
        self.upper = nn.Linear(40, 2).double()
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.lower:
            x = torch.tanh(layer(torch.nn.functional.pad(x, (0, layer.in_features - x.shape[1]))))
        return self.upper(x.double()).sum()


class Wire:
    """Sums over one worker, and keeps what it was given."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def begin(self, flats: Sequence[Tensor], among: tuple[int, ...], line: GroupLine) -> list[Any]:
        assert line is GroupLine.BUCKETS
        self.sent += [flat.clone() for flat in flats]
        return []

    def finish(self, works: Sequence[Any]) -> None:
        assert not works


class Bench:
    """A model whose gradients lie in one flat memory, as a run has them."""

    def __init__(self, share: float = 0.5) -> None:
        torch.manual_seed(0)
        self.model = Net()
        trained = list(self.model.parameters())
        layout = describe(self.model, trained)
        memory = torch.zeros(layout.segment_bytes, dtype=torch.uint8)
        self.flats, self.slab, self.wire = gradient_parts(layout, memory), Slab(layout, []), Wire()
        views = layout.gradient_views(memory)
        names = dict(self.model.named_parameters())
        pairs = [(names[slot.name], view) for slot, view in zip(layout.trained, views, strict=True)]
        for parameter, view in pairs:
            parameter.grad = view
        self.buckets = Buckets(layout, pairs, self.flats, self.wire, self.slab, lambda: share)  # type: ignore[arg-type]

    def backward(self) -> None:
        self.model(torch.ones(2, 3)).backward()


@pytest.mark.parametrize("each", [1, 300, 2000, 10**9])
def test_a_plan_covers_every_gradient_exactly_once_and_the_last_come_first(each: int) -> None:
    model = Net()
    layout = describe(model, list(model.parameters()))
    buckets = plan(layout, first_bytes=100, each_bytes=each)
    members = [index for bucket in buckets for index in bucket.members]
    assert sorted(members) == list(range(len(layout.trained)))
    for number, region in enumerate(layout.regions):
        ours = [bucket for bucket in buckets if bucket.region == number]
        assert ours[0].stop == region.size_bytes
        assert ours[-1].start == 0
        assert all(before.start == after.stop for before, after in pairwise(ours))
        assert [i for b in ours for i in b.members] == sorted(
            (i for b in ours for i in b.members), reverse=True
        )
        assert all(bucket.stop - bucket.start >= each for bucket in ours[1:-1])


def test_buckets_leave_while_backward_goes_on_and_the_rest_at_the_step() -> None:
    bench = Bench()
    seen: list[int] = []
    bench.model.lower[0].weight.register_hook(lambda gradient: seen.append(len(bench.wire.sent)))
    bench.backward()
    assert seen[0] >= 1, (
        "the double layer's bucket was on its way before the first layer's gradient was there"
    )
    assert bench.buckets.send_rest(), "nothing has changed"
    for flat, there in zip(bench.flats, bench.slab.flats(), strict=True):
        assert torch.equal(there, 0.5 * flat)
        assert bool(flat.any())


def change_scale(bench: Bench) -> None:
    for parameter in bench.model.parameters():
        assert parameter.grad is not None
        torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], torch.zeros(1), torch.tensor(0.5))


CHANGES: dict[str, Callable[[Bench], object]] = {
    "accumulated": lambda bench: bench.backward(),
    "clipped": lambda bench: nn.utils.clip_grad_norm_(bench.model.parameters(), 1e-3),
    "one of them doubled": lambda bench: bench.model.upper.bias.grad.mul_(2),  # type: ignore[union-attr]
    "unscaled, without a trace in its version": change_scale,
    "zeroed": lambda bench: bench.buckets.spoil(),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_gradient_that_changes_after_it_was_sent_is_found_out(how: str) -> None:
    bench = Bench()
    bench.backward()
    CHANGES[how](bench)
    assert not bench.buckets.send_rest()
    bench.buckets.finish()
    for flat in bench.flats:
        flat.zero_()
    bench.backward()
    assert bench.buckets.send_rest(), "the next iteration is another matter"


def test_gradients_that_were_none_come_back_to_their_place() -> None:
    bench = Bench()
    bench.model.zero_grad(set_to_none=True)
    bench.backward()
    assert bench.buckets.send_rest()
    assert bool(bench.flats[0].any())
    assert bench.model.upper.bias.grad is not None


def test_nothing_leaves_after_the_end() -> None:
    bench = Bench()
    bench.buckets.stop()
    bench.backward()
    assert not bench.wire.sent


def test_packed_parts_are_views_of_one_flat_tensor_per_dtype() -> None:
    parts = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(4)]
    flats, views = pack(parts)
    assert [(flat.dtype, flat.numel()) for flat in flats] == [(torch.float32, 7), (torch.float64, 2)]
    views[2].fill_(5.0)
    assert flats[0].tolist() == [0.0] * 3 + [5.0] * 4


def test_a_share_of_nothing_is_nothing_even_of_what_is_not_finite() -> None:
    bench = Bench()
    bench.slab.fill([torch.full_like(flat, float("nan")) for flat in bench.flats], 0.0)
    assert not any(bool(part.any()) for part in bench.slab.parts())
