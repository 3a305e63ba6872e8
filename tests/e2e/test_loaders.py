"""Loaders of all kinds. Gradients are whole numbers, so the weights tell exactly what was trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import WeightedRandomSampler

from e2e.scripts.cases import CASES
from paceline.trace.events import ModelReady
from support.runs import Lab, Run, once

SAMPLES, BATCH, EPOCHS, WORKERS = 60, 4, 3, 3
ASP = {"workers": WORKERS, "protocol": "asp", "weighting": "sum"}


def data() -> Tensor:
    return CASES["exact"].samples(SAMPLES)[0]


def trained_on(run: Run) -> Tensor:
    """The sum of all samples whose gradients are in the weights."""
    model, _ = CASES["exact"].build()
    return model.state_dict()["w"] - run.weights["w"]


@pytest.mark.parametrize("protocol", ["asp", "ssp"])
@pytest.mark.parametrize("kind", ["plain", "processes", "persistent", "batches", "generator", "dictionary"])
def test_every_sample_is_trained_on_once_per_epoch(lab: Lab, kind: str, protocol: str) -> None:
    run = lab.trained("loaders.py", kind, **ASP | {"protocol": protocol})
    assert torch.equal(trained_on(run), EPOCHS * data().sum(0))
    units = SAMPLES // BATCH if kind == "batches" else SAMPLES
    assert run.used() == once(EPOCHS, units)
    assert run.result.samples == EPOCHS * SAMPLES


@pytest.mark.parametrize("kind", ["processes", "persistent", "stream", "batches"])
def test_lockstep_works_with_every_loader_too(lab: Lab, kind: str) -> None:
    """Also when batches are loaded ahead and some workers run out of them before the others."""
    run = lab.trained("loaders.py", kind, **ASP | {"protocol": "bsp"})
    torch.testing.assert_close(trained_on(run), EPOCHS * data().sum(0))
    assert run.result.samples == EPOCHS * SAMPLES


def test_a_stream_is_dealt_to_the_workers_in_turn(lab: Lab) -> None:
    run = lab.trained("loaders.py", "stream", **ASP)
    assert torch.equal(trained_on(run), EPOCHS * data().sum(0))
    assert run.result.samples == EPOCHS * SAMPLES
    assert run.of(ModelReady)[0].samples_per_epoch is None


def test_a_weighted_sampler_gives_all_workers_the_same_order(lab: Lab) -> None:
    """What is drawn twice is trained on twice; what is not drawn, not at all."""
    run = lab.trained("loaders.py", "weighted", seed=5, **ASP)
    drawn = []
    for epoch in range(EPOCHS):
        torch.manual_seed((5 * 1_000_003 + epoch) & 0x7FFF_FFFF)
        drawn += list(WeightedRandomSampler(range(1, SAMPLES + 1), SAMPLES))
    assert torch.equal(trained_on(run), data()[drawn].sum(0))


def test_drop_last_leaves_the_rest_of_each_epoch_out(lab: Lab) -> None:
    run = lab.trained("loaders.py", "drop_last", **ASP)
    kept = SAMPLES // 7 * 7
    assert torch.equal(trained_on(run), EPOCHS * data()[:kept].sum(0))
    assert run.used() == once(EPOCHS, kept)


def test_one_worker_uses_the_loader_as_it_is(lab: Lab) -> None:
    run = lab.trained("loaders.py", "drop_last", workers=1)
    assert torch.equal(trained_on(run), EPOCHS * data()[: SAMPLES // 7 * 7].sum(0))


@pytest.mark.parametrize("protocol", ["bsp", "asp", "ssp", "dssp"])
def test_with_equal_shards_every_batch_belongs_to_one_rank(lab: Lab, protocol: str) -> None:
    slow = {"device_time_s": 0.002, "slow": {2: 3.0}}
    run = lab.trained("loaders.py", "plain", **ASP | {"protocol": protocol}, shards="equal", **slow)
    assert run.used() == once(EPOCHS, SAMPLES)
    owners = {first // BATCH % WORKERS: p.pushed for p in run.pushes for _, first, _ in p.work}
    assert owners == {0: 0, 1: 1, 2: 2}
    assert all(first // BATCH % WORKERS == p.pushed for p in run.pushes for _, first, _ in p.work)


def test_the_share_of_a_killed_worker_goes_to_the_others(lab: Lab) -> None:
    dials = ASP | {"shards": "equal", "device_time_s": 0.004, "slow": {2: 2500.0}}
    running = lab.start("loaders.py", "plain", **dials)
    running.until_training()
    running.kill(2)
    run = lab.finish(running)
    assert run.died == {2}
    assert run.used() == once(EPOCHS, SAMPLES)
    assert torch.equal(trained_on(run), EPOCHS * data().sum(0))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("liar", "gave 40 of the 60"),
        ("rounds_down", "gave more than the 8 that its length promises"),
        ("distributed", "DistributedSampler"),
    ],
)
def test_a_loader_that_cannot_work_is_refused_with_the_reason(lab: Lab, kind: str, words: str) -> None:
    run = lab.run("loaders.py", kind, **ASP)
    assert run.result.status == "failed"
    assert words in run.end.detail
    assert run.end.user_mistake


ACCUMULATING = """
from cases import CASES
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join()
case = CASES["exact"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(60)), batch_size=4, num_workers={processes})
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(3):
    for number, (x, y) in enumerate(loader, 1):
        model(x).sum().backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize("processes", [0, 1])
def test_a_push_of_two_batches_is_booked_with_both(lab: Lab, processes: int, in_scripts: Any) -> None:
    """A batch left over at the end of an epoch is pushed with the first of the next one."""
    run = lab.trained(in_scripts(ACCUMULATING.format(processes=processes)), **ASP)
    booked = [data()[first : first + size].sum(0) for p in run.pushes for _, first, size in p.work]
    assert torch.equal(trained_on(run), torch.stack(booked).sum(0))
    assert max(len(push.work) for push in run.pushes) >= 2
    assert not run.used() - once(EPOCHS, SAMPLES), "some position was used twice"


BREAKING = """
from cases import CASES
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join()
case = CASES["exact"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(60)), batch_size=4, num_workers={processes})
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in range(6):
    for number, (x, y) in enumerate(loader, 1):
        case.iteration(model, optimizer, x, y)
        if number == 2:
            break
"""


@pytest.mark.parametrize("processes", [0, 2])
def test_a_loop_that_breaks_off_goes_on_with_the_next_batches(
    lab: Lab, processes: int, in_scripts: Any
) -> None:
    """Also with what was loaded ahead when it broke off: nothing is lost, nothing is booked in vain."""
    run = lab.trained(in_scripts(BREAKING.format(processes=processes)), **ASP)
    booked = [data()[first : first + size].sum(0) for p in run.pushes for _, first, size in p.work]
    assert torch.equal(trained_on(run), torch.stack(booked).sum(0))
    assert max(run.used().values()) == 1
    assert run.used()[0, 0] == run.used()[0, SAMPLES - 1] == 1


BY_HAND = """
from cases import CASES
import paceline

pace = paceline.join()
case = CASES["exact"]
model, optimizer = case.build()
model, optimizer = pace.prepare(model, optimizer)
x, y = case.samples(60)
for step in range(10):
    case.iteration(model, optimizer, x[pace.rank :: pace.size], y)
"""


@pytest.mark.parametrize("protocol", ["bsp", "asp", "ssp", "dssp"])
def test_a_script_may_bring_its_own_data(lab: Lab, protocol: str, in_scripts: Any) -> None:
    """Without a loader nobody knows the samples, and yet every push counts once."""
    dials = ASP | {"protocol": protocol, "device_time_s": 0.002}
    run = lab.trained(in_scripts(BY_HAND), **dials)
    assert len(run.pushes) == 10 * WORKERS
    assert run.result.samples is None
    if protocol != "bsp":
        assert torch.equal(trained_on(run), 10 * data().sum(0))
    else:
        torch.testing.assert_close(trained_on(run), 10 * data().sum(0))


# -- chunks ------------------------------------------------------------------------------------------


def read_by(run: Run) -> dict[int, list[set[int]]]:
    """Per worker and epoch, the positions it was given."""
    found = {rank: [set[int]() for _ in range(EPOCHS)] for rank in range(WORKERS)}
    for push in run.pushes:
        assert push.pushed is not None
        for epoch, first, count in push.work:
            found[push.pushed][epoch] |= set(range(first, first + count))
    return found


@pytest.mark.parametrize("protocol", ["selsync", "local_sgd", "asp"])
@pytest.mark.parametrize("shards", ["own", "rotating"])
def test_chunks_belong_to_workers_for_good_or_in_rotation(lab: Lab, shards: str, protocol: str) -> None:
    """Shuffled: the order is drawn once, so what a worker has read in three epochs tells all."""
    run = lab.trained("loaders.py", "generator", workers=WORKERS, protocol=protocol, shards=shards)
    assert run.used() == once(EPOCHS, SAMPLES)
    for epochs in read_by(run).values():
        assert all(len(each) == SAMPLES // WORKERS for each in epochs)
        assert len(set.union(*epochs)) == (SAMPLES if shards == "rotating" else SAMPLES // WORKERS)


def test_injected_samples_are_trained_on_beside_ones_own(lab: Lab) -> None:
    """All share the whole of their batches: of a loader's four samples one is one's own, two are others'."""
    dials: dict[str, Any] = {"workers": WORKERS, "protocol": "allreduce", "shards": "own"}
    plain = lab.trained("loaders.py", "plain", **dials)
    mixed = lab.trained("loaders.py", "plain", inject="1:1", **dials)
    assert plain.used() == mixed.used() == once(EPOCHS, SAMPLES)
    assert {push.samples for push in mixed.pushes} == {1}, "those of others are not counted"
    steps = [push for push in mixed.pushes if push.pushed == 0]
    assert len(steps) == EPOCHS * SAMPLES // WORKERS
    model, _ = CASES["exact"].build()
    start, x = model.state_dict()["w"], data()
    chunks = x.view(WORKERS, SAMPLES // WORKERS, -1)
    expected = torch.zeros_like(start)
    for _ in range(EPOCHS):
        for step in range(SAMPLES // WORKERS):  # everybody has the samples of all
            expected += chunks[:, step].sum(0)
    assert torch.equal(trained_on(mixed), expected)


@pytest.mark.parametrize(
    ("kind", "dials", "words"),
    [
        ("stream", {"shards": "own"}, "an iterable dataset"),
        ("batches", {"shards": "rotating", "inject": "1:1"}, "a batch sampler of its own"),
        ("plain", {"shards": "own", "inject": "0.5:0.25"}, "less than one sample to share"),
    ],
)
def test_what_a_loader_cannot_do_is_refused_with_the_reason(
    lab: Lab, kind: str, dials: dict[str, Any], words: str
) -> None:
    run = lab.run("loaders.py", kind, workers=WORKERS, protocol="selsync", **dials)
    assert run.end.user_mistake
    assert words in run.end.detail
