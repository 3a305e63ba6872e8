"""Time to an accuracy: how many batches a pipeline needs, times the seconds it was measured to take for one.

Both are measured, but apart: batches in one process, where the stages take turns and a busy machine changes
nothing, seconds on emulated devices. GPipe and 1F1B compute what back-propagation does, and so need its
batches; `bp` needs them too, and has the time of one stage after another. Every pipeline gets its best of the
same learning rates, chosen with a seed that does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.pipeline.in_turn import InTurn
from paceline.parallel.registry import make_pipeline
from paceline_bench.cluster import cifar
from paceline_bench.cluster.tasks import network as images_network
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stats import paired_ratio, spread

STAGES = 4
MOMENTUM = 0.9
LOOK = 8
"""Batches between two looks at the accuracy."""
SMOOTH = 2
"""Looks whose mean has to reach the target."""


class Speeds(NamedTuple):
    """Seconds per batch, as measured."""

    ours: dict[str, float]
    torchs: float
    """The faster of GPipe and 1F1B, with the number of micro-batches that suits it best."""


class PipelineData(NamedTuple):
    """What is learned."""

    name: str
    blocks: Callable[[int], nn.Sequential]
    """Made from a seed: four stages."""
    cuts: tuple[int, ...]
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    batch: int
    target: float
    most: int
    """Batches after which a run is given up."""
    rates: tuple[float, ...]


class Needed(NamedTuple):
    """What a pipeline needed to get there."""

    batches: list[int]
    """By seed; 0: it never did."""
    rate: float


class PipelineEntry(NamedTuple):
    """A pipeline that is tried."""

    protocol: str
    predict: bool = False

    def __str__(self) -> str:
        return f"{self.protocol} predict=True" if self.predict else self.protocol


EXACT = PipelineEntry("bp")
ENTRIES = tuple(
    PipelineEntry(name, predict) for name in ("adl", "fdg", "layerwise") for predict in (False, True)
)


def to_accuracy(speeds: Speeds, plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Rows for the digits, and for CIFAR-10 where there is a folder with it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row for data in _there(plan, say) for row in _rows(data, speeds, plan, say)]
    finally:
        torch.set_num_threads(threads)


def _there(plan: BenchPlan, say: Say) -> list[PipelineData]:
    if plan.quick:
        return [_made_up()]
    found = []
    if find_spec("sklearn") is None:
        say("no time to accuracy on the digits: they come with scikit-learn. pip install 'paceline[demo]'")
    else:
        found.append(_digits())
    return [*found, *([] if plan.data is None else [_images(Path(plan.data))])]


def _rows(data: PipelineData, speeds: Speeds, plan: BenchPlan, say: Say) -> list[BenchRow]:
    seeds = range(plan.seed, plan.seed + (1 if plan.quick else max(3, plan.seeds)))
    entries = [entry for entry in ENTRIES if entry.protocol in speeds.ours]
    exact = _needed(EXACT, data, seeds, say)
    found = {entry: _needed(entry, data, seeds, say) for entry in entries}
    found |= {EXACT: exact} if EXACT.protocol in speeds.ours else {}
    return [_row(entry, own, exact, data, seeds, speeds) for entry, own in found.items()]


def _row(
    entry: PipelineEntry, own: Needed, best: Needed, data: PipelineData, seeds: Sequence[int], speeds: Speeds
) -> BenchRow:
    (needed, own_rate), (exact, rate) = own, best
    there = [(mine, his) for mine, his in zip(needed, exact, strict=True) if mine and his]
    ours = [mine * speeds.ours[entry.protocol] for mine, _ in there]
    theirs = [his * speeds.torchs for _, his in there]
    value, interval = paired_ratio(theirs, ours, seeds[0]) if there else (None, None)
    missed = len(seeds) - len(there)
    return BenchRow(
        case={"protocol": str(entry), "slowest stage": "1x", "against": f"time to {data.name}"},
        measured={"paceline": spread(ours), "gpipe or 1f1b": spread(theirs)} if there else {},
        figure="ratio",
        table="Time to an accuracy",
        value=value,
        interval=interval,
        remark=f"batches {_list(needed)} at rate {own_rate:g}, exact {_list(exact)} at {rate:g}"
        + (f"; {missed} of {len(seeds)} did not get there" if missed else ""),
    )


def _list(batches: Sequence[int]) -> str:
    return " ".join(str(each) if each else "-" for each in batches)


def _needed(entry: PipelineEntry, data: PipelineData, seeds: Sequence[int], say: Say) -> Needed:
    """Batches to the target for every seed, at the best rate of a seed of its own."""
    rate = _best_rate(entry, data, seeds[-1] + 1)
    needed = [_batches(entry, data, seed, rate) for seed in seeds]
    say(f"pipeline, {data.name}: {entry} needs {_list(needed)} batches at rate {rate:g}")
    return Needed(needed, rate)


def _best_rate(entry: PipelineEntry, data: PipelineData, seed: int) -> float:
    """The soonest there, the first of equals; one that cannot be sooner any more is given up."""
    best, most = data.rates[0], data.most
    for rate in data.rates:
        taken = _batches(entry, data._replace(most=most), seed, rate)
        if taken:
            best, most = rate, taken - 1
    return best


def _batches(entry: PipelineEntry, data: PipelineData, seed: int, rate: float) -> int:
    """How many batches it takes; 0: more than there may be."""
    model = data.blocks(seed)
    settings = {"predict": True} if entry.predict else {}
    schedule = make_pipeline(entry.protocol, settings).schedule(STAGES)
    pipe = InTurn(
        schedule,
        model,
        data.cuts,
        F.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM),
    )
    draw, seen, fed = torch.Generator().manual_seed(seed), [0.0] * SMOOTH, 0
    while fed < data.most:
        order = torch.randperm(len(data.y), generator=draw)
        for chosen in torch.split(order, data.batch)[: min(len(data.y) // data.batch, data.most - fed)]:
            pipe.step(data.x[chosen], data.y[chosen])
            fed += 1
            if fed % LOOK == 0:
                seen = [*seen[1:], _accuracy(model, data)]
                if sum(seen) / SMOOTH >= data.target:
                    return fed
    return 0


@torch.no_grad()
def _accuracy(model: nn.Module, data: PipelineData) -> float:
    """Of the weights as they are, with what is under way left alone."""
    return float((model(data.test_x).argmax(1) == data.test_y).float().mean())


# -- data -------------------------------------------------------------------------------------


def _digits() -> PipelineData:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order].reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)[order]
    sets = (x[360:], y[360:], x[:360], y[:360])
    return PipelineData(
        "95 % on the digits", _convolutions, (1, 2, 3), *sets, 32, 0.95, 600, (0.0125, 0.025, 0.05)
    )


def _convolutions(seed: int) -> nn.Sequential:
    """Four blocks without batch norm, so that micro-batches would compute the same."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()),
        nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def _images(folder: Path) -> PipelineData:
    training, (test_x, test_y) = cifar.training_set(folder), cifar.test_set(folder, 500)
    pixels, classes = training.tensors
    sets = (cifar.scaled(pixels[:20_000]), classes[:20_000], test_x, test_y)
    name = "40 % on CIFAR-10"
    return PipelineData(name, images_network, (2, 4, 6), *sets, 64, 0.40, 1200, (0.01, 0.03, 0.06))


def _made_up() -> PipelineData:
    """Points on either side of a line, learned at once."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=draw)
    y = (x.sum(1) > 0).long()

    def blocks(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))

    return PipelineData("70 % of made-up points", blocks, (1, 2, 3), x, y, x, y, 16, 0.7, 100, (0.05,))
