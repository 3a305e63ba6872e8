"""What a rule for stale gradients is: arithmetic on one piece of flat memory at a time.

All rules are element-wise. So it does not matter where memory is cut into pieces, for threads or for hosts.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Shared = dict[str, Tensor]
"""What a rule remembers for all workers together, by name: vectors beside the weights."""


class GradientRule(Protocol):
    """Changes a gradient before any optimizer sees it."""

    memory: tuple[str, ...]
    """Names of the vectors that it keeps."""
    watches: bool
    """Whether it wants to know how far each step moved the weights."""

    def mend(self, gradient: Tensor, now: Tensor, read: Tensor, shared: Shared) -> None:
        """Change the gradient, in place: it was computed at the weights `read`, and they are `now` by now."""
        ...

    def moved(self, before: Tensor, now: Tensor, shared: Shared) -> None:
        """A step was made. `before` may be written to."""
        ...
