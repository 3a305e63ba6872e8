"""What the workers of a line do in tests. A module of its own, since other processes import it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.parallel.sequence import Line, Sharded, gather, mean, split, switch
from paceline.parallel.sequence.gradients import average_gradients
from paceline.parallel.sequence.megatron import MegatronBlock
from paceline.parallel.sequence.spacetime import SPACE, TIME, SpaceTimeLayer
from paceline.parallel.sequence.ways import made

WIDTH, HEADS = 12, 12  # 12 heads can be shared out among 2, 3 and 4 workers


def drawn(shape: list[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def round_trip(line: Line, shape: list[int], one: int, other: int, dtype: str = "float32") -> dict[str, bool]:
    """Whether cutting, switching there and back, and gathering give back the very same numbers."""
    x = (drawn(shape) * 100).to(getattr(torch, dtype))
    cut = split(x, one, line)
    there = switch(cut, other)
    back = switch(there, one)
    return {
        "gathered": torch.equal(gather(cut), x),
        "switched": torch.equal(gather(there), x),
        "back": torch.equal(back.valid, cut.valid) and (back.dim, back.length) == (cut.dim, cut.length),
        "where": torch.equal(cut.valid, x.narrow(one, min(cut.offset, x.shape[one]), cut.valid.shape[one])),
        "shape": tuple(x.shape) == cut.shape == there.shape,
        "identity": line.size > 1 or (cut.local is x and gather(there) is x),
    }


def adjoint(line: Line, shape: list[int], one: int, other: int) -> tuple[float, float]:
    """This worker's parts of <switch(x), y> and of <x, switch^T(y)>."""
    x = split(drawn(shape, 1), one, line).valid.detach()
    whole = Sharded(_padded(x, one, line.part(shape[one])).requires_grad_(), one, shape[one], line)
    there = switch(whole, other)
    y = drawn(list(there.local.shape), 7 + line.rank)
    there.local.backward(y)
    assert whole.local.grad is not None
    return (there.local.detach() * y).sum().item(), (whole.local.detach() * whole.local.grad).sum().item()


def _padded(x: Tensor, dim: int, part: int) -> Tensor:
    missing = x.new_zeros((*x.shape[:dim], part - x.shape[dim], *x.shape[dim + 1 :]))
    return torch.cat([x, missing], dim)


class Model(nn.Module):
    """Weights outside the split region on both sides, and two layers inside."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(SpaceTimeLayer(WIDTH, HEADS) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((1, 2)))


def model(layers: int = 2) -> Model:
    torch.manual_seed(3)
    return Model(layers).double()


def against_one_process(
    line: Line, shape: list[int], way: str, average: bool = True
) -> dict[str, float | dict[str, int]]:
    """How far output and averaged gradients are from those of one process, and what was sent."""
    x, y = drawn([*shape, 3]), drawn([shape[0], 2], 1)
    plain, mine = model(), model()
    expected = plain(x)
    F.mse_loss(expected, y).backward()
    ways = [made(way, layer, line) for layer in mine.layers]  # type: ignore[arg-type]
    z = split(mine.embed(x), TIME, line)
    before = dict(line.bytes), dict(line.calls)
    for compute, _ in ways:
        z = compute(z)
    inside = {"bytes": sum(line.bytes.values()) - sum(before[0].values()), **line.calls}
    out = mine.head(gather(z).mean((1, 2)))
    loss = F.mse_loss(out, y)
    forward = dict(line.bytes)
    loss.backward()
    backward = sum(line.bytes.values()) - sum(forward.values())
    modules = [mine.embed, mine.head, *(module for _, module in ways)]
    if average:
        blocks = [b for module in modules for b in module.modules() if isinstance(b, MegatronBlock)]
        alone = [p for block in blocks for p in block.own()]
        average_gradients([p for module in modules for p in module.parameters()], line, alone)
    return {
        "forward": _apart(out, expected),
        "gradients": _gradients_apart(way, plain, mine, ways, line),
        "inside": inside,
        "backward_bytes": backward - line_gather_bytes(x, line),
        "backward_calls": dict(line.calls),
        "nan": float(not bool(torch.isfinite(out).all())),
    }


def line_gather_bytes(x: Tensor, line: Line) -> int:
    """What the backward pass of the first split sends: it is not the layers'."""
    batch, time, space, _ = x.shape
    return batch * line.part(time) * space * WIDTH * 8 * (line.size - 1)


def _gradients_apart(way: str, plain: Model, mine: Model, ways: list[Any], line: Line) -> float:
    apart = []
    for name in ("embed", "head"):
        pairs = zip(getattr(plain, name).parameters(), getattr(mine, name).parameters(), strict=True)
        apart += [_apart(b.grad, a.grad) for a, b in pairs]
    for expected, (_, module) in zip(plain.layers, ways, strict=True):
        if way == "megatron":
            expected = _rows_of_gradients(expected, line)  # type: ignore[arg-type]
            own = [p.grad for p in module.parameters()]
        else:
            expected, own = [p.grad for p in expected.parameters()], [p.grad for p in module.parameters()]
        apart += [_apart(b, a) for a, b in zip(expected, own, strict=True)]
    return max(apart)


def _rows_of_gradients(layer: SpaceTimeLayer, line: Line) -> list[Tensor]:
    """Cut as the weights are: a layer whose weights are the gradients, taken apart."""
    with torch.no_grad():
        for p in layer.parameters():
            assert p.grad is not None
            p.copy_(p.grad)
    return [p.detach() for p in made("megatron", layer, line)[1].parameters()]


def _apart(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-9)).item()


def unscaled(line: Line, shape: list[int]) -> dict[str, float]:
    """Without scaling: how far averages are off, and sums over the line inside, own gradients outside."""
    x, y = drawn([*shape, 3]), drawn([shape[0], 2], 1)
    plain, mine = model(1), model(1)
    F.mse_loss(plain(x), y).backward()
    compute, layer = made("dynamic", mine.layers[0], line)  # type: ignore[arg-type]
    z = gather(compute(split(mine.embed(x), TIME, line)))
    F.mse_loss(mine.head(z.mean((1, 2))), y).backward()
    outside = [*zip(plain.embed.parameters(), mine.embed.parameters(), strict=True)]
    outside += zip(plain.head.parameters(), mine.head.parameters(), strict=True)
    inside = [*zip(plain.layers[0].parameters(), layer.parameters(), strict=True)]
    found = {"outside": max(_apart(b.grad, a.grad) for a, b in outside)}
    for _, p in inside:
        assert p.grad is not None
        line.all_reduce(p.grad)
    found["summed"] = max(_apart(b.grad, a.grad) for a, b in inside)
    found["averaged"] = max(_apart(b.grad / line.size, a.grad) for a, b in inside if b.grad is not None)
    return found


def loss_on_parts(line: Line, shape: list[int]) -> dict[str, float]:
    """The mean over tokens that stay cut, and its averaged gradients, against one process."""
    x = drawn([*shape, WIDTH])
    torch.manual_seed(3)
    plain, mine = (SpaceTimeLayer(WIDTH, HEADS).double() for _ in range(2))
    mine.load_state_dict(plain.state_dict())
    expected = plain(x).square().mean()
    expected.backward()
    compute, _ = made("dynamic", mine, line)
    found = mean(compute(split(x, TIME, line)).map(torch.square))
    found.backward()
    average_gradients(mine.parameters(), line)
    pairs = zip(plain.parameters(), mine.parameters(), strict=True)
    return {"loss": _apart(found, expected), "gradients": max(_apart(b.grad, a.grad) for a, b in pairs)}


def averaged_in_part(line: Line) -> list[list[float] | None]:
    """Three parameters of one size: each worker has a gradient of one, and nobody of the last."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[line.rank % 2].grad = torch.full((2,), 1.0 + line.rank)
    average_gradients(parameters, line)
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def dropped(line: Line, steps: int) -> dict[str, Any]:
    """Which tokens dropout inside and outside the split region leaves, and where the generators stand."""
    torch.manual_seed(11)
    drop, x = nn.Dropout(0.5), torch.ones(1, 4 * line.size, 16)
    inside = [split(x, 1, line).map(drop).local for _ in range(steps)]
    outside = drop(x)
    return {
        "inside": [part.flatten().tolist() for part in inside],
        "outside": outside.flatten().tolist(),
        "next": torch.rand(1).item(),
    }


def drawn_again(line: Line) -> bool:
    """Whether a part that is computed from the same state of the generator drops the same tokens."""
    torch.manual_seed(5)
    part, drop = split(torch.ones(1, 4, 4, 8), TIME, line), nn.Dropout(0.5)
    state = torch.get_rng_state()
    once = part.map(drop).local
    torch.set_rng_state(state)
    return torch.equal(once, part.map(drop).local)


def recomputed(line: Line) -> dict[str, Any]:
    """Dropout and switches in a region that torch computes once more in the backward pass."""
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop  # takes seconds

    torch.manual_seed(5)
    x = torch.randn(1, 4, 4, 8, dtype=torch.float64)
    drop = nn.Dropout(0.5)
    kept: list[Tensor] = []

    def region(local: Tensor) -> Tensor:
        z = switch(Sharded(local, TIME, 4, line), SPACE).map(drop)
        kept.append(z.local.detach())
        return z.local

    local = split(x, TIME, line).local.requires_grad_()
    with set_checkpoint_early_stop(False):
        made = checkpoint(region, local, use_reentrant=False)
        forward = line.calls["all_to_all"]
        made.sum().backward()
    return {
        "same": len(kept) == 2 and torch.equal(*kept),
        "forward": forward,
        "all": line.calls["all_to_all"],
    }


def feeds(line: Line, odd: int | None) -> str:
    """What is said when one worker has another sample."""
    x = torch.arange(6.0) + (line.rank == odd)
    try:
        line.check_same([x, torch.tensor([True])], "batches")
    except PacelineError as error:
        return str(error)
    return ""


def refused(line: Line, what: str) -> str:
    """What is said of bad input; nothing is exchanged before."""
    x = torch.zeros(1, 8, 8, 12)
    try:
        if what == "short":
            split(x[:, :3], 1, line)
        elif what == "short switch":
            switch(split(x[:, :, :2], 1, line), 2)
        elif what in ("ulysses", "megatron"):
            layer = SpaceTimeLayer(12, 6)
            made(what, layer, line)[0](split(x, 1, line))
        elif what == "batch norm":
            split(x, 1, line).map(nn.Sequential(nn.BatchNorm2d(8)))
        elif what == "moved":
            split(x, 1, line).map(lambda local: local.transpose(1, 2))
        elif what == "dimension":
            split(x, 5, line)
    except PacelineError as error:
        assert not line.calls
        return f"{type(error).__name__}: {error}"
    return ""
