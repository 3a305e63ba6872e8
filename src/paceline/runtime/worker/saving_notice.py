"""Notices that a script saves a prepared model by itself, so that it can be told what it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import nn


def notice_saving(models: Iterable[nn.Module], tell: Callable[[], None]) -> None:
    """Be told when somebody takes the state of one of these models.

    By the class and not by a hook: a hook would be saved, copied and pickled along with the model.
    """
    plain, known = nn.Module.state_dict, {id(model) for model in models}

    @wraps(plain)
    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(self) in known:
            tell()
        return plain(self, *args, **kwargs)

    nn.Module.state_dict = state_dict  # type: ignore[method-assign]
