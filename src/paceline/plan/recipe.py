"""A recipe as a plan needs it: its functions `model`, `data` and `loss`, without training anything."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

NEEDED = ("model", "data", "loss")


@dataclass(frozen=True)
class RecipeFile:
    """What `paceline.run` is given, as the recipe's file defines it."""

    path: Path
    model: Callable[[], nn.Module]
    data: Callable[[], DataLoader[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[Any], Any] | None = None

    def settings(self) -> dict[str, float]:
        """Learning rate and momentum of the recipe's optimizer; empty when the file does not define one."""
        if self.optimizer is None:
            return {}
        with blamed_on(self.path):
            group = self.optimizer(self.model().parameters()).param_groups[0]
        return {name: float(group[name]) for name in ("lr", "momentum") if name in group}


def load_recipe(path: Path) -> RecipeFile:
    """Run the file, but not its `if __name__ == "__main__"`, and take its functions."""
    if not path.is_file():
        raise ConfigError(f"no recipe at {path}. Give the path of a Python file.")
    with blamed_on(path), _found_beside(path):
        names = runpy.run_path(str(path), run_name="paceline_recipe")
    missing = [name for name in NEEDED if not callable(names.get(name))]
    if missing:
        raise ConfigError(
            f"{path} does not define {' and '.join(f'{name}()' for name in missing)}. A recipe has functions "
            "model(), data() and loss(model, batch); without one, give --curvature and --noise."
        )
    optimizer = names.get("optimizer")
    optimizer = optimizer if callable(optimizer) else None
    return RecipeFile(path, names["model"], names["data"], names["loss"], optimizer)


@contextmanager
def blamed_on(path: Path) -> Iterator[None]:
    """Errors of the recipe's own code, in one line that names it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{path} raised {type(error).__name__}: {text}") from error


@contextmanager
def _found_beside(path: Path) -> Iterator[None]:
    """Modules beside the recipe can be imported while it is read."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
