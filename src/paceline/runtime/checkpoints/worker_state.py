"""Where a worker stood, apart from model and optimizer: its random numbers and its prepared schedulers.

A checkpoint of a paced run keeps this for every worker, so that a run in lockstep goes on bit for bit. A
worker tells it when the run is stopped; and with a push, if it was asked to, since a checkpoint is due then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from paceline.runtime.checkpoints.random_state import RandomState

IN_STEP = -1
"""For a scheduler that was stepped as often as the run: the script is stopped inside of `optimizer.step()`,
and will not come to the `scheduler.step()` that belongs to it."""


class Mark(msgspec.Struct, frozen=True):
    """What else is kept of a prepared scheduler."""

    origin: int = 0
    """The run's position at which it was at its beginning."""
    since: int = 0
    """Steps of its worker's since it was stepped last."""


class WorkerState(msgspec.Struct, frozen=True):
    """What one worker tells of itself."""

    random: RandomState
    epoch: int
    """Of its last batch."""
    schedules: tuple[int, ...] = ()
    """How often each prepared scheduler was stepped, in the order in which they were prepared; or IN_STEP."""
    marks: tuple[Mark, ...] = ()
    """What else is known of each; checkpoints of older versions do not tell."""
    norms: tuple[int, float] = (0, 0.0)
    """Of event-triggered pushes: how many norms were seen, and their running mean."""


def standing(steps: int, began: int) -> int:
    """What to keep of a scheduler that was stepped so often, when the iteration under way `began`."""
    return IN_STEP if steps >= began else steps


def steps_to_take(kept: int | None, position: int) -> int:
    """How often to step a scheduler that begins anew in a run that goes on at a position."""
    return position if kept is None or kept == IN_STEP else kept


def saved(states: Mapping[int, Any]) -> dict[str, dict[str, Any]]:
    """As a checkpoint keeps them."""
    return {str(rank): msgspec.to_builtins(state, str_keys=True) for rank, state in states.items()}


def restored(states: Mapping[str, Any]) -> dict[int, WorkerState]:
    """What a checkpoint has kept."""
    return {int(rank): msgspec.convert(state, WorkerState) for rank, state in states.items()}


def all_told(states: Mapping[int, Any], ranks: Iterable[int]) -> bool:
    """Whether each of them has told where it stands."""
    return all(rank in states for rank in ranks)
