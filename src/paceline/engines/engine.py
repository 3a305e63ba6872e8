"""What every engine offers to whoever conducts a run."""

from __future__ import annotations

from typing import Protocol

from paceline.config import RunConfig
from paceline.engines.control import Ended


class Engine(Protocol):
    """Starts the processes of a run, and tells when all of them are gone."""

    def launch(self, config: RunConfig, secret: str = "") -> None:
        """Start a run; it goes on by itself."""

    def wait(self, timeout_s: float) -> Ended | None:
        """The end of the run, if it comes within this time."""

    def stop(self) -> None:
        """Ask the run to end and to save its state."""

    def close(self) -> None:
        """End everything that is left."""
