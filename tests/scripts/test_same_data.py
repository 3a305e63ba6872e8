"""All workers train on the same data, however the script came by it; what they cannot share is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from paceline.runtime.worker.data.fingerprint import fingerprint
from paceline.store.work.budget import Fingerprint
from support.runs import Lab

SPLIT = """
import random, sys
import numpy as np
import torch, paceline
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, random_split

x = torch.cat((torch.arange(32.0).unsqueeze(1), torch.randn(32, 1)), 1)
data = TensorDataset(x)
if sys.argv[1] == "split":
    train, valid = random_split(data, [24, 8])
    held, loader = valid.indices, DataLoader(train, batch_size=2, shuffle=True)
else:
    order = np.random.permutation(32).tolist()
    held, loader = order[24:], DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(order[:24]))
before = [torch.rand(()).item(), random.random(), np.random.rand()]
pace = paceline.join()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
seen = []
for (rows,) in loader:
    model(rows).mean().backward()
    optimizer.step()
    seen += rows[:, 0].tolist()
after = [torch.rand(()).item(), random.random(), np.random.rand()]
alike = pace.gather(torch.tensor([before]))
apart = pace.gather(torch.tensor([after]))
trained = {int(number) for number in pace.gather(torch.tensor(seen)).tolist()}
if pace.lead:
    print("held", sorted(held), "trained", sorted(trained))
    assert trained == set(range(32)) - set(held)
    assert len({tuple(row) for row in alike.tolist()}) == 1
    assert all(len(set(column)) == pace.size for column in apart.T.tolist())
    print("all is well")
"""


@pytest.mark.parametrize("dials", [{"protocol": "bsp"}, {"protocol": "allreduce"}, {"mesh": {"data": 3}}])
@pytest.mark.parametrize("how", ["split", "permutation"])
def test_a_split_without_a_seed_is_the_same_on_all_workers(lab: Lab, how: str, dials: dict[str, Any]) -> None:
    """What rank 0 holds back nobody trains on. Random numbers are apart once training begins."""
    run = lab.trained(lab.script(SPLIT), how, workers=3, **dials)
    assert run.result.samples == 24
    assert "all is well" in run.log()


def test_one_worker_draws_what_the_first_of_several_draws(lab: Lab) -> None:
    alone, several = (lab.trained(lab.script(SPLIT), "split", workers=n).log() for n in (1, 2))
    assert next(line for line in alone.splitlines() if "held" in line) in several


OWN = """
import sys, torch, paceline
import numpy as np
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

pace = paceline.join()
order = np.random.default_rng(pace.rank // 2).permutation(32).tolist()
data = TensorDataset(torch.arange(64.0).reshape(32, 2))
own = TensorDataset(torch.randn(32, 2, generator=torch.Generator().manual_seed(pace.rank // 2)))
loader = {
    "subset": DataLoader(Subset(Subset(data, order[:24]), range(20)), batch_size=2),
    "sampler": DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(order[:24])),
    "tensors": DataLoader(own, batch_size=2),
}[sys.argv[1]]
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
"""


@pytest.mark.parametrize("dials", [{"protocol": "asp"}, {"protocol": "allreduce"}, {"mesh": {"data": 3}}])
@pytest.mark.parametrize("kind", ["subset", "sampler", "tensors"])
def test_data_that_are_a_ranks_own_are_refused(lab: Lab, kind: str, dials: dict[str, Any]) -> None:
    run = lab.run(lab.script(OWN), kind, workers=3, **dials)
    assert "ranks 0 and 2 have different data" in run.end.detail
    assert "generator=torch.Generator().manual_seed(0)" in run.end.detail
    assert run.end.user_mistake


def seen(data: Dataset[Any], sampler: Any = None) -> Fingerprint:
    return fingerprint(DataLoader(data, batch_size=2, sampler=sampler))


def rows(seed: int) -> Tensor:
    return torch.randn(40, 3, generator=torch.Generator().manual_seed(seed))


def test_a_fingerprint_tells_indices_and_rows_apart_at_any_depth() -> None:
    data = TensorDataset(rows(0), torch.arange(40))
    made: list[Fingerprint] = [
        seen(data),
        seen(TensorDataset(rows(1), torch.arange(40))),
        seen(TensorDataset(rows(0), torch.arange(40) + 1)),
        seen(Subset(data, range(20))),
        seen(Subset(data, range(20, 40))),
        seen(Subset(Subset(data, range(30)), range(20))),
        seen(Subset(Subset(data, range(1, 31)), range(20))),
        seen(ConcatDataset([data, Subset(data, [1, 2])])),
        seen(ConcatDataset([data, Subset(data, [2, 1])])),
        seen(data, SubsetRandomSampler([1, 2])),
        seen(data, SubsetRandomSampler([2, 1])),
    ]
    for number, one in enumerate(made):
        assert [i for i, other in enumerate(made) if one.fits(other)] == [number]


def test_a_fingerprint_takes_no_offence_at_last_digits_nor_at_how_indices_are_kept() -> None:
    """Two machines may add up in another order."""
    values = rows(0)
    values[0, 0] = torch.nan
    assert seen(TensorDataset(values)).fits(seen(TensorDataset(values * (1 + 1e-6))))
    data = TensorDataset(values)
    assert seen(Subset(data, [3, 4])).fits(seen(Subset(data, torch.tensor([3, 4]))))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(0, 3),
        torch.ones(5, dtype=torch.bool),
        torch.ones(5, 2, dtype=torch.bfloat16),
        torch.ones(5, 2, dtype=torch.complex64),
        torch.ones(5, 0),
        torch.eye(5).to_sparse(),
        torch.ones(5, 3, requires_grad=True),
    ],
)
def test_a_fingerprint_can_be_taken_of_every_tensor(values: Tensor) -> None:
    assert seen(TensorDataset(values), RandomSampler(range(1))).fits(
        seen(TensorDataset(values), RandomSampler(range(1)))
    )


def test_a_subset_by_names_has_no_numbers_to_compare() -> None:
    names: Any = ["a", "b"]
    assert seen(Subset(TensorDataset(rows(0)), names)).fits(seen(Subset(TensorDataset(rows(0)), names)))
