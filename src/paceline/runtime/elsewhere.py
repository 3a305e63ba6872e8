"""A script's optimizer whose steps are taken elsewhere: its state is fetched to be saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.runtime.optimizer_state import give_state, in_order, state_of
from paceline.runtime.worker.link import StoreLink


class Elsewhere:
    """Stands between one optimizer and what steps in its place."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        index: dict[int, int],
        link: StoreLink,
        warn: Callable[[str], None],
    ) -> None:
        self._trained = in_order(optimizer, index)
        self._link, self._warn, self._warned = link, warn, False
        optimizer.register_state_dict_pre_hook(self._lend)
        optimizer.register_state_dict_post_hook(self._take_back)
        optimizer.register_load_state_dict_pre_hook(self._refuse)
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def _lend(self, optimizer: torch.optim.Optimizer) -> None:
        """Let it have the state for as long as it is saved."""
        if self._link.reaches_state:
            give_state(optimizer, self._trained, self._link.recall())
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
            self._link.restore(state_of(optimizer, self._trained))
        optimizer.state.clear()
