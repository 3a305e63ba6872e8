"""What a script writes into parameters by itself: said once, and refused where nothing could carry it."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import ConfigError
from paceline.runtime.worker.model.binding import Binding


class Writing:
    """One worker's script."""

    def __init__(self, binding: Binding, rank: int, increments: bool, say: Callable[[str], None]) -> None:
        """`increments`: this worker pushes what its weights have changed by."""
        self._binding, self._rank, self._increments, self._say = binding, rank, increments, say
        self._told = False

    def look(self) -> None:
        """Once per step: say what becomes of it."""
        if self._told and not self._increments:
            return
        names = self._binding.written()
        if names and self._increments:
            self._refuse(names)
        if names and not self._told:
            self._told = True
            self._mention(names[0])

    def _refuse(self, names: list[str]) -> None:
        """The store adds to what is trained, and hands out the rest as it was."""
        name = self._binding.untrained(names)
        if name is not None:
            raise ConfigError(
                f"rank {self._rank} wrote to {name!r}, which is not trained, so no increment carries it and "
                "the store's next weights would undo it. Give a teacher to pace.prepare as a model of its "
                "own, beside the one that is trained, or leave out --apply increments and use peers."
            )

    def _mention(self, name: str) -> None:
        wrote = f"rank {self._rank} wrote to parameters by itself ({name!r}, say): that "
        fate = "becomes part of its next increment, and so of everybody's weights"
        if not self._increments:
            fate = "lasts until the next optimizer.step(), which brings the run's weights"
        self._say(
            f"{wrote}{fate}. Write before prepare, or train with a protocol that has no store, such as "
            "local_sgd"
        )
