"""Some of a model's tensors: what an operation is about that is not about all of them."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class Part(msgspec.Struct, frozen=True):
    """Some of the model's tensors, by their numbers, in order."""

    tensors: tuple[int, ...]
    size_bytes: int


class Tensors(Protocol):
    """The trained tensors that every vector like the parameters consists of."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each."""
        ...

    def scores(self, one: Any, other: Any, part: Part) -> dict[int, float]:
        """Per tensor of a part, the mean of |one times other| over its elements."""
        ...

    def copy(self, source: Any, target: Any, part: Part) -> None:
        """Write these tensors of one vector to another."""
        ...


class _NoTensors:
    """Of a driver that knows of none."""

    sizes: tuple[int, ...] = ()

    def scores(self, one: Any, other: Any, part: Part) -> dict[int, float]:
        return {}

    def copy(self, source: Any, target: Any, part: Part) -> None:
        pass


NO_TENSORS: Tensors = _NoTensors()
