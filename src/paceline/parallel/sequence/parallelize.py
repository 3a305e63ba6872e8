"""Ties a model that cuts its sequences to a mesh: its line of workers, equal weights, averaged gradients."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.parallel.mesh import Mesh, Share
from paceline.parallel.sequence.gradients import average_gradients
from paceline.parallel.sequence.line import AXIS, Line
from paceline.parallel.sequence.sharded import refuse_batch_norm
from paceline.protocols.grid import Grid

Model = TypeVar("Model", bound=nn.Module)


class SequenceShare(Share):
    """What a run asks of the axis `sequence`: its workers have parts of the same samples."""

    def __init__(self, model: nn.Module, line: Line) -> None:
        super().__init__(AXIS)
        self._model, self._line = model, line

    def combine(self, samples: int) -> None:
        """The gradients of one step: parts inside the split region, equal ones outside."""
        average_gradients(self._model.parameters(), self._line)


def parallelize(model: Model, mesh: Grid, *, short: bool = False) -> Model:
    """Give the modules that have a `line` that of the mesh. Before `pace.prepare`; all workers come here.

    `short`: sequences may be shorter than the line. Along `data` the model is repeated, as ever. On a mesh
    without the axis, and alone, the model stays as it is: its own `Line()` is a line of one.
    """
    if not isinstance(mesh, Mesh) or mesh.size(AXIS) == 1:
        return model
    line = Line.of(mesh, short=short)
    holders = [module for module in model.modules() if isinstance(getattr(module, "line", None), Line)]
    if not holders:
        raise ConfigError(
            f"--mesh has {AXIS}={line.size}, but no module of {type(model).__name__} has a line. "
            "Set self.line = Line() in its __init__, and give it to split()."
        )
    for module in holders:
        module.line = line  # type: ignore[assignment]
    _begin_equal(model, line)
    model.register_forward_pre_hook(_same_samples(line), with_kwargs=True)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.register_forward_pre_hook(_outside(line))
    mesh.split(SequenceShare(model, line))
    return model


def _begin_equal(model: nn.Module, line: Line) -> None:
    """Equal weights, and random numbers that go on alike."""
    numbers = torch.get_rng_state()
    for tensor in (*model.parameters(), *model.buffers(), numbers):
        line.broadcast(tensor.detach())
    torch.set_rng_state(numbers)


def _outside(line: Line) -> Any:
    """For what a function given to `map` calls: it cannot be seen from outside."""

    def check(module: nn.Module, args: tuple[Any, ...]) -> None:
        if line.inside:
            refuse_batch_norm(module)

    return check


def _same_samples(line: Line) -> Any:
    def check(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
        line.check_same(given, "samples")

    return check
