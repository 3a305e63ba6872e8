"""Several optimizers as one: GANs and actor-critics have one for each of their models.

What steps, saves and describes an optimizer sees one with all parameter groups, in order; every group and
every parameter's state stay those of the optimizer they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError


class States(MutableMapping[Tensor, Any]):
    """What all of them remember, each of its own parameters."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, parameter: Tensor) -> MutableMapping[Tensor, Any]:
        for optimizer in self._optimizers:
            if any(parameter is p for group in optimizer.param_groups for p in group["params"]):
                return optimizer.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._of(parameter)[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._of(parameter)[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._of(parameter)[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in optimizer.state for optimizer in self._optimizers)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for optimizer in self._optimizers for parameter in list(optimizer.state))

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """Without making a state where there is none."""
        if parameter in self:
            return self[parameter]
        return default

    def clear(self) -> None:
        """Forget everything."""
        for optimizer in self._optimizers:
            optimizer.state.clear()


class Together(torch.optim.Optimizer):
    """All of them, in order."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Not as torch begins: that would copy the groups, and schedulers write to those that are there.
        self.optimizers = tuple(optimizers)
        self.defaults: dict[str, Any] = {}
        self.__setstate__({})
        _check_apart(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of all, as they are now."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> States:  # type: ignore[override]
        """Those of all."""
        return States(self.optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Each steps what has a gradient."""
        for optimizer in self.optimizers:
            optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """To each its own part."""
        first = group = 0
        for optimizer in self.optimizers:
            plain = optimizer.state_dict()["param_groups"]
            groups = state_dict["param_groups"][group : group + len(plain)]
            count = sum(len(each["params"]) for each in plain)
            states = {i - first: s for i, s in state_dict["state"].items() if first <= i < first + count}
            renumbered = [new | {"params": own["params"]} for new, own in zip(groups, plain, strict=True)]
            optimizer.load_state_dict({"state": states, "param_groups": renumbered})
            first, group = first + count, group + len(plain)


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers it consists of: itself, if it is not several."""
    return optimizer.optimizers if isinstance(optimizer, Together) else (optimizer,)


def title(optimizer: torch.optim.Optimizer) -> str:
    """Its class, or theirs."""
    names = [type(part).__name__ for part in parts_of(optimizer)]
    return names[0] if len(set(names)) == 1 else "+".join(names)


def _check_apart(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    owner: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if owner.setdefault(id(p), number) != number:
                raise ConfigError(
                    f"optimizers {owner[id(p)]} and {number} share a parameter (of shape {list(p.shape)}). "
                    "Give every parameter to one of them."
                )
