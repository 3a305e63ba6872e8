"""Notices what a script does with its prepared models by itself: that it saves, loads or evaluates them.

By the class and not by a hook: a hook would be saved, copied and pickled along with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import nn

from paceline.errors import ConfigError


def notice(method: str, models: Iterable[nn.Module], tell: Callable[[], None]) -> None:
    """Be told when somebody calls this method of one of these models."""
    known = {id(model) for model in models}
    _before(method, lambda module: tell() if id(module) in known else None)


def renorming(models: Iterable[nn.Module]) -> list[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """Layers that write to their own weights in every forward pass, with their names."""
    named = (item for model in models for item in model.named_modules())
    return [
        (name, layer)
        for name, layer in named
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None
    ]


def refuse_renorming(models: Iterable[nn.Module]) -> None:
    """Refuse such layers where weights come from elsewhere after every step."""
    for name, layer in renorming(models):
        raise ConfigError(
            f"layer {name!r} has max_norm={layer.max_norm}, so it writes to its weights in every forward "
            "pass, but they come from elsewhere after every step, which would undo that. Leave max_norm out, "
            "and bound the rows after every step: pace.after_step(fn) before pace.prepare(), with "
            "layer.weight.renorm_(2, 0, max_norm) in fn."
        )


def _before(method: str, look: Callable[[nn.Module], None]) -> None:
    plain = getattr(nn.Module, method)

    @wraps(plain)
    def looked_at(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        look(self)
        return plain(self, *args, **kwargs)

    setattr(nn.Module, method, looked_at)
