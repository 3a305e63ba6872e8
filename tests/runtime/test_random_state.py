"""Random numbers go on after a stop as they would have gone on without it."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.runtime.checkpoints.random_state import RandomState, seed


def draw(loader: DataLoader[tuple[torch.Tensor, ...]]) -> list[object]:
    return [
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        [x.tolist() for (x,) in loader],
    ]


def test_what_was_taken_and_put_back_through_json_gives_the_same_numbers() -> None:
    generator = torch.Generator().manual_seed(4)
    loader = DataLoader(TensorDataset(torch.arange(9)), batch_size=2, shuffle=True, generator=generator)
    random.gauss(0, 1)
    np.random.standard_normal()
    taken = msgspec.json.encode(RandomState.now(loader))
    first = draw(loader)
    assert draw(loader) != first
    msgspec.json.decode(taken, type=RandomState).restore(loader)
    assert draw(loader) == first


def test_a_seed_begins_all_of_them_anew() -> None:
    generator = torch.Generator()
    loader = DataLoader(TensorDataset(torch.arange(9)), batch_size=2, shuffle=True, generator=generator)
    seed(3, loader)
    first = draw(loader)
    seed(3, loader)
    assert draw(loader) == first
    seed(4, loader)
    assert draw(loader) != first
