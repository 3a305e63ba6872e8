"""Runs of the benchmark of strategies on hosts of a testbed, one worker each, with links of known speed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from paceline.errors import RunError
from paceline.testbed import Testbed
from paceline_bench.cluster.hosts import (
    FIRST_PORT,
    HostProcesses,
    OtherProcesses,
    OurProcesses,
    Script,
    bytes_over,
)
from paceline_bench.cluster.scene import Scene
from paceline_bench.strategies.roster import Strategy
from paceline_bench.strategies.runs import script
from paceline_bench.strategies.runs.places import PATIENCE_S, Ran, check_world
from paceline_bench.strategies.runs.request import StrategyRequest, read_answers
from paceline_bench.strategies.runs.sides import WEIGHTS

LOOK_S = 0.05


class OurStrategy(OurProcesses):
    """A run of Paceline's."""

    def __init__(
        self, scene: Scene, bed: Testbed, strategy: Strategy, request: StrategyRequest, port: int
    ) -> None:
        super().__init__(scene, bed, strategy, [], Path(request.folder), port)
        self._seed, self._file = request.seed, str(request.save())

    def _script(self) -> Script:
        return Script(script.__file__, ["--seed", str(self._seed)], [self._file])


class TorchStrategy(OtherProcesses):
    """A run of torch's own."""

    def __init__(
        self, scene: Scene, bed: Testbed, strategy: Strategy, request: StrategyRequest, port: int
    ) -> None:
        super().__init__(scene, bed, [], Path(request.folder), port)
        self._name, self._file = strategy.name, str(request.save())

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "paceline_bench.strategies.runs.script", self._name, self._file]


def wait(run: HostProcesses) -> None:
    """Until all have ended well; what the first that did not said is the error."""
    end = time.monotonic() + PATIENCE_S
    while None in run.statuses.values():
        if any(run.statuses.values()):
            raise RunError(str(run.failure()))
        if time.monotonic() > end:
            raise RunError(f"it did not end within {PATIENCE_S:g} s")
        time.sleep(LOOK_S)


class Bed:
    """Hosts that are there for all runs of a cell."""

    def __init__(self, workers: int, mbit: float) -> None:
        names = [f"h{rank}" for rank in range(workers)]
        self._scene = Scene(name="strategies", links_mbit=dict.fromkeys(names, mbit))
        self._bed, self._last, self._port = self._scene.testbed(), names[-1], FIRST_PORT

    def run(self, strategy: Strategy, request: StrategyRequest) -> Ran:
        """One run. The store, where there is one, is on the first host, beside its worker."""
        folder, link = Path(request.folder), self._bed[self._last]
        self._port += 1
        kind = TorchStrategy if strategy.protocol is None else OurStrategy
        run: HostProcesses = kind(self._scene, self._bed, strategy, request, self._port)
        before = bytes_over(link)
        try:
            run.start()
            wait(run)
        finally:
            run.stop()
        moved = bytes_over(link) - before
        answers = read_answers(folder, request.workers)
        check_world(strategy.name, answers, request.workers)
        if strategy.protocol is None:
            return Ran(answers, folder / WEIGHTS, None, moved)
        kept = folder / "runs" / "latest"
        return Ran(answers, kept / WEIGHTS, kept / "trace.jsonl", moved)

    def down(self) -> None:
        """Take it away."""
        self._bed.down()
