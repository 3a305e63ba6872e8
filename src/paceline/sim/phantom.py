"""A vector that has a size and nothing else: enough to tell how long it is under way."""

from __future__ import annotations

from typing import Any

from paceline.errors import ConfigError


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
            "Run it for real: paceline train SCRIPT."
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
