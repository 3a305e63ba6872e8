"""The same data once more: when a protocol wants their gradient at other parameters.

A script's loop is its own, so its loader gives the batches since the last step a second time, with random
numbers as they were, and the loop computes on them as on any other. Nothing of it is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from paceline.errors import ConfigError
from paceline.runtime.checkpoints.random_state import RandomState


class SecondPass:
    """One worker's."""

    def __init__(self, begin: Callable[[], None]) -> None:
        """`begin` is told when computing begins again."""
        self._begin = begin
        self._data: list[Any] = []
        self._random: RandomState | None = None
        self._feeds = False
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.on = False
        """Whether anybody will ever ask."""
        self.wanted = False

    def through(self, data: Any) -> Iterator[Any]:
        """What a loader gives the script: the data, and again if that is wanted by then."""
        if not self.on:
            yield data
            return
        if not self._data:
            self._random = RandomState.now()
        self._feeds = True
        self._data.append(data)
        yield data
        if self.wanted and self._random is not None:
            self._random.restore()
            for each in list(self._data):
                self._begin()
                yield each

    def want(self, buffers: list[Tensor]) -> None:
        """A gradient of the same data is needed; the model's buffers will be as they are now afterwards."""
        if not self._feeds:
            raise ConfigError(
                "the protocol is to measure gradients of the same data at other parameters, and this script "
                "has no prepared loader that could give them again. Give pace.prepare the training loader."
            )
        self.wanted = True
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]

    def done(self) -> None:
        """Here it is."""
        self.wanted = False
        for buffer, before in self._buffers:
            buffer.copy_(before)

    def forget(self) -> None:
        """A step is complete."""
        self._data.clear()
