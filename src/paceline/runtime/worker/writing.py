"""What a script writes into weights that come from elsewhere after every step: refused by name.

With a store, and where all-reduce steps one model for all, the next weights would undo it without a word.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import ConfigError
from paceline.runtime.worker.model.binding import Binding


class Writing:
    """One worker's script."""

    def __init__(self, binding: Binding, rank: int, say: Callable[[str], None]) -> None:
        self._binding, self._rank, self._say = binding, rank, say

    def look(self, leaving: bool = False) -> None:
        """Before every step and evaluation. When this worker is `leaving`, it is told only."""
        found = self._binding.overwritten()
        if found is None:
            return
        name, trained = found
        if leaving:
            self._say(
                f"rank {self._rank} wrote to {name!r} after its last step: the run saves its own weights, "
                "without that. Write after pace.leave()"
            )
            return
        raise ConfigError(self._refusal(name, trained))

    def look_evaluated(self) -> None:
        """After what `pace.evaluate` called."""
        found = self._binding.overwritten()
        if found is not None:
            raise evaluation_wrote(self._rank, found[0])

    def _refusal(self, name: str, trained: bool) -> str:
        wrote = f"rank {self._rank} wrote to {name!r} by itself, "
        if not trained:
            return (
                f"{wrote}which is not trained, so no step would keep the change. Give a teacher to "
                "pace.prepare() as a second model."
            )
        return (
            f"{wrote}and the next step would overwrite that with the run's weights. If it belongs to every "
            "step (a clamp, a largest norm), register it before pace.prepare(): pace.after_step(fn). Write "
            "other values before pace.prepare(), after pace.leave(), or to a copy (copy.deepcopy(model)); "
            "perturbed weights have to be put back before the step."
        )


def evaluation_wrote(rank: int, name: str) -> ConfigError:
    """What is evaluated lies there for the time of the evaluation only."""
    return ConfigError(
        f"rank {rank} wrote to {name!r} in the function of pace.evaluate(), and that is undone when training "
        "goes on. Evaluate other weights in a copy (copy.deepcopy(model)), or put the run's back before the "
        "function returns."
    )
