"""What a script may not do with weights that all workers read, and nobody may write to."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.fabric.segment import Segment
from paceline.runtime.worker.model.model_calls import notice_loading, renorming


class Sharing:
    """One worker's, from the beginning of training until its model is its own."""

    def __init__(self, weights: Segment) -> None:
        self._first = weights.bytes.data_ptr()
        self._end = self._first + weights.size_bytes

    def guard(self, models: Iterable[nn.Module]) -> None:
        """Refuse what is known to write there."""
        for name, layer in renorming(models):
            if self._holds(layer.weight):
                raise ConfigError(
                    f"layer {name!r} has max_norm={layer.max_norm}, so it writes to its weights in every "
                    "forward pass, but in lockstep all workers read the same weights. Leave max_norm out, or "
                    "give every worker a copy of the weights with --private-weights."
                )
        notice_loading(self._look)

    def _look(self, module: nn.Module) -> None:
        if any(self._holds(parameter) for parameter in module.parameters()):
            raise ConfigError(
                "load_state_dict() of a prepared model: in lockstep all workers read the same weights, and "
                "nobody may write to them. Evaluate other weights in a copy (copy.deepcopy(model)), load the "
                "first ones before pace.prepare() and the last ones after pace.leave(), or give every worker "
                "a copy of the weights with --private-weights."
            )

    def _holds(self, tensor: Tensor) -> bool:
        return self._first <= tensor.data_ptr() < self._end
