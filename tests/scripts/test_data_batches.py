"""Scripts that sample their own batches, and scripts written for torchrun."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from paceline.trace.events import Note, Reported
from support.runs import Lab, Run, once
from support.tensors import assert_equal, threads

CHARACTERS = """
import os, random, sys, numpy as np, torch, paceline
from torch import nn
pace = paceline.join()
torch.manual_seed(1337)
random.seed(1337)
np.random.seed(1337)
told = sys.argv[1:] == ["told"]
data = torch.randint(0, 16, (1000,))

def get_batch():
    at = torch.randint(len(data) - 8, (6,))
    return torch.stack([data[i:i + 8] for i in at]), torch.stack([data[i + 1:i + 9] for i in at])

model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = pace.prepare(model, optimizer)
begun = sum(p.double().sum().item() for p in model.parameters())
for step in range(12):
    x, y = get_batch()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    if told:
        pace.report(samples=len(x))
    optimizer.step()
    pace.report(loss=loss, begun=begun, drawn=float(x.sum() * 1000 + random.random() + np.random.rand()))
"""


def plain() -> dict[str, torch.Tensor]:
    """The same script without Paceline."""
    torch.manual_seed(1337)
    data = torch.randint(0, 16, (1000,))
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(12):
        at = torch.randint(len(data) - 8, (6,))
        x = torch.stack([data[i : i + 8] for i in at])
        y = torch.stack([data[i + 1 : i + 9] for i in at])
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


def drawn(run: Run, name: str = "drawn") -> list[list[float]]:
    """What each rank reported, iteration by iteration."""
    told = [event for event in run.of(Reported) if name in event.values]
    ranks = sorted({event.worker for event in told})
    return [[event.values[name] for event in told if event.worker == rank] for rank in ranks]


def test_alone_it_is_plain_pytorch_and_samples_are_unknown(lab: Lab) -> None:
    run = lab.trained(lab.script(CHARACTERS), workers=1)
    with threads(2):
        assert_equal(run.weights, plain())
    assert run.result.samples is None
    assert run.result.iterations == run.result.updates == 12


@pytest.mark.parametrize("protocol", ["bsp", "asp", "allreduce", "local_sgd"])
def test_workers_draw_different_batches_from_equal_weights_every_time_the_same(
    lab: Lab, protocol: str
) -> None:
    script = lab.script(CHARACTERS)
    run = lab.trained(script, "told", workers=3, protocol=protocol)
    own = drawn(run)
    assert len({tuple(each) for each in own}) == 3
    assert len({each[0] for each in drawn(run, "begun")}) == 1
    assert drawn(lab.trained(script, workers=3, protocol=protocol)) == own
    assert run.result.samples == 3 * 12 * 6
    assert run.result.iterations == 3 * 12
    warned = [event.text for event in run.of(Note) if "no loader" in event.text]
    assert len(warned) == 1
    assert "report(samples=" in warned[0]


AWARE = """
import json, os, sys, torch, paceline
from pathlib import Path
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
told = {name: int(os.environ[name]) for name in names}
Path(sys.argv[1], f"{told['RANK']}.json").write_text(json.dumps(told))
if sys.argv[2:] == ["group"]:
    torch.distributed.init_process_group("gloo")
pace = paceline.join()
assert (pace.rank, pace.size) == (told["RANK"], told["WORLD_SIZE"])
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pace.prepare(model, optimizer)
model(torch.ones(2)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_for_torchrun_finds_its_rank(lab: Lab, workers: int) -> None:
    lab.trained(lab.script(AWARE), lab.root, workers=workers)
    for rank in range(workers):
        told = json.loads((lab.root / f"{rank}.json").read_text())
        assert told == {
            "RANK": rank,
            "WORLD_SIZE": workers,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": workers,
        }


def test_a_process_group_besides_is_refused_in_words(lab: Lab) -> None:
    run = lab.run(lab.script(AWARE), lab.root, "group", workers=2)
    assert run.result.status == "failed"
    assert all("leave out init_process_group" in each.detail for each in run.result.failures)
    assert len(run.result.failures) == 2


IN_ORDER = """
import sys, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
pace = paceline.join()
torch.manual_seed(int(sys.argv[1]))
data = torch.arange(30.0, dtype=torch.float64)[:, None]
loader = DataLoader(TensorDataset(data), batch_size=int(sys.argv[2]), shuffle=True,
                    generator=torch.Generator().manual_seed(7))
model = nn.Linear(1, 1, bias=False).double()
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(3):
    for (x,) in loader:
        pace.report(**{f"x{i}": value for i, value in enumerate(x.flatten())})
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


def seen(run: Run) -> list[float]:
    """All samples, in the order of the rounds, and of the ranks in each."""
    told: list[list[list[float]]] = [[] for _ in range(run.config.workers)]
    for event in run.of(Reported):
        told[event.worker].append(list(event.values.values()))
    return [value for group in zip(*told, strict=True) for batch in group for value in batch]


def test_a_loaders_own_generator_gives_the_same_order_for_any_number_of_workers(lab: Lab) -> None:
    script = lab.script(IN_ORDER)
    alone = seen(lab.trained(script, 1, 10, workers=1))
    assert len(alone) == 90
    assert alone[:30] != alone[30:60]
    for workers, protocol, batch in ((2, "bsp", 5), (5, "allreduce", 2)):
        run = lab.trained(script, 2, batch, workers=workers, protocol=protocol, seed=9)
        assert seen(run) == alone
        assert run.used() == once(3, 30)


def test_generators_that_differ_between_workers_are_refused(lab: Lab) -> None:
    run = lab.run(lab.script(IN_ORDER.replace("manual_seed(7)", "manual_seed(pace.rank)")), 1, 5, workers=2)
    assert run.end.user_mistake
    assert "Use the same seed on all" in run.end.detail


def test_a_script_that_never_joins_is_told_when_its_first_worker_ends(lab: Lab) -> None:
    """Not when all have trained: the other would sleep for minutes."""
    text = "import os, time\ntime.sleep(300 if os.environ['RANK'] == '1' else 0)\n"
    run = lab.run(lab.script(text), workers=2)
    assert run.end.user_mistake
    assert "never called paceline.join" in run.end.detail
    assert run.result.seconds < 100


SAVES = """
import torch, paceline
pace = paceline.join()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
pace.prepare(model, optimizer)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.state_dict()
"""


def test_a_warning_is_given_once_by_each_worker(lab: Lab) -> None:
    run = lab.trained(lab.script(SAVES), workers=2, protocol="asp")
    texts = [event.text for event in run.of(Note) if event.level == "warning"]
    assert len(texts) == len(set(texts))
