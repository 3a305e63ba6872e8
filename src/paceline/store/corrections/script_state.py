"""What a script saves and loads of the optimizer that steps in the store: as torch would have it alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from paceline.errors import ConfigError
from paceline.store.corrections.correction import without_ours
from paceline.store.optimizers import import_state
from paceline.store.parameters import ParameterStore

State = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and plain values, both under `number.name`."""


def saved(store: ParameterStore) -> State:
    """A copy of what it remembers."""
    corrections = store.corrections
    if corrections is not None and corrections.steps:
        return corrections.plain(), {}
    return store.optimizer_state()


def load(store: ParameterStore, state: State, workers: Collection[int]) -> None:
    """Go on from this, or anew if it is empty. `workers` are there."""
    corrections, named = store.corrections, state[0] | state[1]
    if len(without_ours(named)) < len(named):
        raise ConfigError(
            "the optimizer's state that was loaded is not one of torch's: an earlier version saved it under "
            "--correct dana. Load another one, or go on from a checkpoint with --resume."
        )
    if corrections is not None and corrections.steps:
        corrections.load_plain(state, workers)
    else:
        import_state(store.optimizer, *state)
