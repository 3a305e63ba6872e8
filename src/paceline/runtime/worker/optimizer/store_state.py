"""A script's optimizer whose steps are taken elsewhere: its state is fetched to be saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.runtime.checkpoints.optimizer_state import give_state, in_order, state_of
from paceline.runtime.worker.link import StoreLink


class Elsewhere:
    """Stands between one optimizer and what steps in its place."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        index: dict[int, int],
        link: StoreLink,
        warn: Callable[[str], None],
        first: int = 0,
    ) -> None:
        """`first`: the number that its first parameter has there, if it is one of several."""
        self._first = first
        self._trained = in_order(optimizer, index)
        self._link, self._warn, self._warned = link, warn, False
        optimizer.register_state_dict_pre_hook(self._lend)
        optimizer.register_state_dict_post_hook(self._take_back)
        optimizer.register_load_state_dict_pre_hook(self._refuse)
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def _lend(self, optimizer: torch.optim.Optimizer) -> None:
        """Let it have the state for as long as it is saved."""
        if self._link.reaches_state:
            tensors, values = self._link.recall()
            give_state(optimizer, self._trained, (self._own(tensors), self._own(values)))
        elif not self._warned:
            self._warned = True
            self._warn(
                f"rank {self._link.rank} saved optimizer.state_dict(), which holds no state: momentum and "
                "the like live in the store, on another host. A stopped run's checkpoint has them"
            )

    def _take_back(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        optimizer.state.clear()

    def _refuse(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if state.get("state") and not self._link.reaches_state:
            raise ConfigError(
                "optimizer.load_state_dict() after prepare: steps are taken on another host, which would not "
                "see this state. Go on from a run's own checkpoint with --resume."
            )

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """What the lead loads counts, for all; the others have loaded the same."""
        if self._link.rank == 0 and self._link.reaches_state:
            others, mine = self._link.recall(), state_of(optimizer, self._trained)
            self._link.restore((self._among(others[0], mine[0]), self._among(others[1], mine[1])))
        optimizer.state.clear()

    def _is_own(self, name: str) -> bool:
        return 0 <= int(name.split(".", 1)[0]) - self._first < len(self._trained)

    def _own(self, named: dict[str, Any]) -> dict[str, Any]:
        """What belongs to this optimizer, under the numbers it has here."""
        return {_moved(name, -self._first): value for name, value in named.items() if self._is_own(name)}

    def _among(self, others: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
        """The same the other way, beside what belongs to others."""
        kept = {name: value for name, value in others.items() if not self._is_own(name)}
        return kept | {_moved(name, self._first): value for name, value in mine.items()}


def _moved(name: str, by: int) -> str:
    number, key = name.split(".", 1)
    return f"{int(number) + by}.{key}"
