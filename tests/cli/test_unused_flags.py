"""A flag that a command would not look at is refused, or told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from support.shell import Shell

TIMES = ("simulate", "-p", "asp", "-n", 2, "--iterations", 3)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--damping", "inverse"), "--damping changes nothing"),
        (("--lr-cap", 0.1, "--target", 0.9), "--target, --lr-cap change nothing"),
        (("--weighting", "sum", "--correct", "dana"), "--weighting, --correct change nothing"),
    ],
)
def test_a_simulation_of_times_says_what_changes_nothing_in_it(
    shell: Shell, flags: tuple[object, ...], told: str
) -> None:
    ran = shell(*TIMES, *flags)
    assert ran.code == 0, ran.err
    assert told in ran.err


def test_it_says_nothing_of_what_it_looks_at(shell: Shell) -> None:
    slow = ("--park-slow", 1, "--lr", 0.1, "--weighting", "sum")
    for flags in ((), ("--drop-staler", 2), ("--park", 1), slow, ("--shards", "equal", "--seed", 3)):
        assert "change" not in shell(*TIMES, *flags).err, flags


@pytest.mark.parametrize(
    "flags",
    [("--park", 1), ("--drop-staler", 3), ("--balance",), ("--compress", "fp16"), ("--damping", "sqrt")],
)
def test_the_simulation_of_a_split_model_takes_no_flag_of_a_store(
    shell: Shell, flags: tuple[object, ...]
) -> None:
    ran = shell("simulate", "--protocol", "layerwise", "--mesh", "stage=4", *flags)
    assert ran.code == 2
    assert f"does not look at {flags[0]}" in ran.err


def test_a_recipe_takes_its_seat_as_a_script_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every process of torchrun would train a model of its own."""
    seats: list[Callable[..., Any] | str | None] = []
    monkeypatch.setattr("paceline.engines.torchrun.sit_down", seats.append)
    data = TensorDataset(torch.ones(4, 2), torch.zeros(4, 1))
    model = paceline.run(
        model=lambda: nn.Linear(2, 1),
        data=lambda: DataLoader(data, batch_size=2),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        epochs=1,
    )
    assert seats == [None]
    assert isinstance(model, nn.Linear)
