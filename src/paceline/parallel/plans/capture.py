"""Takes the model out of a script: runs it until its prepared model is first called, and no further."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.config import RunConfig
from paceline.errors import ConfigError, PacelineError
from paceline.runtime import seat
from paceline.runtime.join import apart
from paceline.runtime.lone.solo import Solo
from paceline.runtime.seat import Seat


@dataclass
class Captured:
    """What a script trains, and the first thing that it computes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    """Samples of one step: the first dimension of the first tensor that the model is called with."""


class _Enough(BaseException):
    """Ends the script; not an Exception, which scripts may catch."""


class _Watching(Solo):
    """A lone worker whose first forward pass is the last thing that happens."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: Captured | None = None

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
        def enough(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.captured = Captured(model, optimizer, args, kwargs, batch_of(args, kwargs))
            raise _Enough

        self._handle = model.register_forward_pre_hook(enough, with_kwargs=True)
        return loader

    def release(self) -> None:
        """Leave the model as it was."""
        self._handle.remove()


def capture(script: Path, args: tuple[str, ...] = ()) -> Captured:
    """Run the script in this process, up to its first step."""
    watching = _Watching()
    config = RunConfig(run="profile", folder="", script=str(script), args=args)
    seat.take(Seat(0, config, None, stand_in=lambda: watching))
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = [str(script), *args], [str(script.resolve().parent)]
    try:
        with apart():
            runpy.run_path(str(script), run_name="__main__")
    except _Enough:
        pass
    except SystemExit as stop:
        raise ConfigError(f"{script} exited with {stop.code} before it trained anything.") from None
    except PacelineError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{script} raised {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    finally:
        seat.take(None)
        sys.argv, sys.path[:] = argv, path
    if watching.captured is None:
        raise ConfigError(
            f"{script} never called its prepared model, so there is nothing to measure. It has to call "
            "paceline.join(), pace.prepare(model, optimizer, loader) and train."
        )
    watching.release()
    return watching.captured


def batch_of(args: Any, kwargs: Any) -> int:
    """The first dimension of the first tensor."""
    for value in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[0])
    raise ConfigError("the model is called without any tensor that has a batch dimension.")


def with_batch(captured: Captured, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The captured call with another number of samples, cut or repeated."""

    def resized(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != captured.batch:
            return value
        repeats = -(-size // captured.batch)
        return value.repeat(repeats, *[1] * (value.dim() - 1))[:size].detach()

    made = torch.utils._pytree.tree_map(resized, (captured.args, captured.kwargs))
    return made[0], made[1]
