"""A script's optimizer whose steps are taken elsewhere: its state is fetched to be saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.runtime.checkpoints.optimizer_state import State, give_state, in_order, state_of
from paceline.runtime.worker.link import StoreLink


class Absent(defaultdict[Tensor, Any]):
    """Stands where an optimizer has its state: what a script does with it must not be lost without a word."""

    def __init__(self, forget: Callable[[], None], looked: Callable[[], None]) -> None:
        super().__init__(dict)
        self._forget, self._looked = forget, looked

    def clear(self) -> None:
        """All is to be forgotten, wherever it is."""
        super().clear()
        self._forget()

    def __missing__(self, parameter: Tensor) -> Any:
        made: dict[str, Any] = {}
        super().__setitem__(parameter, made)
        return made

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        raise _written()

    def pop(self, *args: Any) -> Any:
        """Nothing is here that could be taken out."""
        raise _written()

    def items(self) -> Any:
        """Nothing, which the script should know."""
        self._looked()
        return super().items()

    def values(self) -> Any:
        """Nothing, which the script should know."""
        self._looked()
        return super().values()

    def check(self) -> None:
        """Refuse what was written into the state of a parameter."""
        if any(super().values()):
            raise _written()
        super().clear()

    def __reduce__(self) -> Any:
        return defaultdict, (dict,)


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
        self._first, self._optimizer = first, optimizer
        self._trained = in_order(optimizer, index)
        self._link, self._warn = link, warn
        self._stepped = False
        self._absent = optimizer.state = Absent(lambda: self._changed(optimizer), self._looked)
        optimizer.register_state_dict_pre_hook(self._lend)
        optimizer.register_state_dict_post_hook(self._take_back)
        optimizer.register_load_state_dict_pre_hook(self._refuse)
        optimizer.register_load_state_dict_post_hook(self._changed)

    def steps(self) -> None:
        """A step begins, with what the script has put in the place of the state."""
        self._adopt()
        self._stepped = True

    def _adopt(self) -> None:
        if self._optimizer.state is not self._absent:
            self._refuse(self._optimizer, {"state": self._optimizer.state})
            self._changed(self._optimizer)
        self._absent.check()

    def _lend(self, optimizer: torch.optim.Optimizer) -> None:
        """Let it have the state for as long as it is saved."""
        self._adopt()
        optimizer.state = defaultdict(dict)
        if self._link.reaches_state:
            tensors, values = self._link.recall()
            give_state(optimizer, self._trained, (self._own(tensors), self._own(values)))
        else:
            self._warn(
                f"rank {self._link.rank} saved optimizer.state_dict(), which holds no state: momentum and "
                "the like live in the store, on another host. A stopped run's checkpoint has them"
            )

    def _take_back(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        optimizer.state = self._absent

    def _refuse(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if (state.get("state") or self._stepped) and not self._link.reaches_state:
            raise ConfigError(
                "the script loads or resets the optimizer's state after prepare: steps are taken on another "
                "host, which would not see it. Go on from a run's own checkpoint with --resume."
            )

    def _changed(self, optimizer: torch.optim.Optimizer) -> None:
        """What the lead loads or forgets counts, for all; the others have done the same."""
        self._refuse(optimizer, {})
        if self._link.lead and self._link.reaches_state:
            self._tell(state_of(optimizer, self._trained))
        optimizer.state = self._absent

    def _tell(self, mine: State) -> None:
        if self._link.config.resume is not None and not self._stepped:
            self._warn(
                "the script sets the optimizer's state before the first step of a resumed run: that of the "
                "checkpoint stays. Leave --resume out to begin with the script's"
            )
            return
        others = self._link.recall()
        self._link.restore((self._among(others[0], mine[0]), self._among(others[1], mine[1])))

    def _looked(self) -> None:
        self._warn(
            f"rank {self._link.rank} reads optimizer.state, which is empty: another process takes the steps "
            "and has the state. Read optimizer.state_dict()"
        )

    def _is_own(self, name: str) -> bool:
        return 0 <= int(name.split(".", 1)[0]) - self._first < len(self._trained)

    def _own(self, named: dict[str, Any]) -> dict[str, Any]:
        """What belongs to this optimizer, under the numbers it has here."""
        return {_moved(name, -self._first): value for name, value in named.items() if self._is_own(name)}

    def _among(self, others: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
        """The same the other way, beside what belongs to others."""
        kept = {name: value for name, value in others.items() if not self._is_own(name)}
        return kept | {_moved(name, self._first): value for name, value in mine.items()}


def _written() -> ConfigError:
    return ConfigError(
        "the script writes to optimizer.state, but steps are taken in another process, so this has no "
        "effect. Change the result of optimizer.state_dict(), and load it with optimizer.load_state_dict()."
    )


def _moved(name: str, by: int) -> str:
    number, key = name.split(".", 1)
    return f"{int(number) + by}.{key}"
