"""A vector that has a size and nothing else: enough to tell how long it is under way."""

from __future__ import annotations

from typing import Any

from paceline.errors import ConfigError
from paceline.protocols.core.parts import Part

TENSORS = 64


class Phantom:
    """Arithmetic gives new phantoms; a question about values has no answer."""

    __slots__ = ("size_bytes",)

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def clone(self) -> Phantom:
        """Another one."""
        return Phantom(self.size_bytes)

    def dot(self, other: Any) -> float:
        """Not to be known."""
        raise ConfigError(
            "this protocol decides by the values of its gradients, and a simulation of times has none. "
            "Simulate it with its script: paceline simulate SCRIPT."
        )

    def __setitem__(self, every: slice, other: Any) -> None:
        pass

    def __add__(self, other: Any) -> Phantom:
        return self.clone()

    def __sub__(self, other: Any) -> Phantom:
        return self.clone()

    def __mul__(self, factor: float) -> Phantom:
        return self.clone()

    __rmul__ = __mul__


class PhantomTensors:
    """As many tensors of equal size as a model might have: which of them matter most is not to be known,
    but how many bytes some of them come to is."""

    def __init__(self, size_bytes: int) -> None:
        each, more = divmod(size_bytes, TENSORS)
        self.sizes = tuple(each + (tensor < more) for tensor in range(TENSORS))

    def scores(self, one: Any, other: Any, part: Part) -> dict[int, float]:
        """All matter the same."""
        return dict.fromkeys(part.tensors, 0.0)

    def copy(self, source: Any, target: Any, part: Part) -> None:
        """Nothing to write."""
