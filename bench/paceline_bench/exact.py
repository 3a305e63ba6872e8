"""Exact simulations, real gradients in virtual time: one zygote forks the processes of all."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import RunConfig
from paceline.engines.control import Ended
from paceline.engines.local import LocalEngine
from paceline.errors import EngineLost, RunError
from paceline.sim.request import ClusterRequest

LOOK_S = 0.2


class ExactRuns:
    """Runs whose workers are told by the same script; its zygote is there from the first run on."""

    def __init__(self, script: str) -> None:
        self._script = script
        self._engine: LocalEngine | None = None

    def close(self) -> None:
        """End what is left."""
        if self._engine is not None:
            self._engine.close()

    def run(
        self, config: RunConfig, look: Callable[[], None] = lambda: None, patience_s: float = inf
    ) -> Ended:
        """One run to its end, with a look at it every now and then."""
        (config.path / "config.json").write_bytes(msgspec.json.encode(config))
        engine = self._engine = self._engine or LocalEngine(self._script)
        try:
            return self._follow(engine, config, look, patience_s)
        except EngineLost:  # the next run gets another
            self._engine = None
            raise

    def _follow(
        self, engine: LocalEngine, config: RunConfig, look: Callable[[], None], patience_s: float
    ) -> Ended:
        engine.launch(config)
        until = time.monotonic() + patience_s
        while (ended := engine.wait(LOOK_S)) is None:
            look()
            if time.monotonic() > until:
                raise RunError(f"a run of {config.protocol} was not over after {patience_s:g} s.")
        look()
        return ended


def virtual(cluster: Path) -> dict[str, Any]:
    """What a run's settings say of a simulated cluster that a file describes."""
    found: dict[str, Any] = msgspec.to_builtins(ClusterRequest(file=str(cluster)), str_keys=True)
    return found


def trouble(config: RunConfig, ended: Ended) -> str:
    """What went wrong in a run, if anything: who failed, and their last words."""
    failed = sorted(rank for rank, status in ended.statuses.items() if status != 0)
    if not failed and ended.store_status == 0:
        return ""
    names = [f"rank{rank}" for rank in failed] + ["store"] * (ended.store_status != 0)
    logs = [config.path / "logs" / f"{name}.log" for name in names]
    said = " ".join(line for log in logs if log.exists() for line in log.read_text().splitlines()[-1:])
    who = f"ranks {failed} failed" if failed else "the store failed"
    return f"{who}: {said}".rstrip(": ")
