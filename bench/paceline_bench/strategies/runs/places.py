"""Where runs take place: workers of this machine, or hosts of a testbed with links of known speed."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from paceline.config import RunConfig
from paceline.decoding import decode_json
from paceline.errors import RunError
from paceline.fabric.channel import Channel
from paceline.parallel.plans import measure_cluster
from paceline_bench.harness.crew import BenchCrew
from paceline_bench.harness.stations import ExchangeLoad, paceline_crew
from paceline_bench.strategies.roster import Strategy
from paceline_bench.strategies.runs.body import StrategySide, train
from paceline_bench.strategies.runs.request import Answer, StrategyRequest, read_answers
from paceline_bench.strategies.runs.sides import TORCH, WEIGHTS, OurSide
from paceline_bench.strategies.server import serve_noted

PATIENCE_S = 300.0


class Ran(msgspec.Struct, frozen=True):
    """What a run left behind."""

    answers: list[Answer]
    weights: Path
    trace: Path | None
    """Of Paceline's own."""
    wire_bytes: int | None = None
    """What the last host's link carried, both ways, as its kernel counts."""


class OurStation:
    """A worker of a run of Paceline's."""

    def __init__(
        self,
        request: StrategyRequest,
        load: ExchangeLoad,
        config: RunConfig,
        rank: int,
        sock: socket.socket | None,
    ) -> None:
        import paceline
        from paceline.runtime import seat

        seat.take(seat.Seat(rank, config, None if sock is None else Channel(sock)))
        self._request = request
        self._side: StrategySide = OurSide(paceline.join())
        self.world = self._side.size

    def prepare(self) -> None:
        """Nothing to prepare."""

    def exchange(self) -> None:
        """The whole run."""
        train(self._side, self._request)

    def close(self) -> None:
        """It has left."""


class TorchStation(OurStation):
    """A worker of somebody else's."""

    def __init__(self, request: StrategyRequest, name: str, rank: int) -> None:
        if name != "single":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            meeting = f"file://{request.folder}/meeting"
            dist.init_process_group("gloo", meeting, rank=rank, world_size=request.workers)
        self._request = request
        self._side = TORCH[name](request)
        self.world = self._side.size


class ProbeStation:
    """Times collectives, for the advice."""

    def __init__(self, folder: str, rank: int, workers: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=workers)
        self.world, self._rank, self._folder = dist.get_world_size(), rank, Path(folder)

    def prepare(self) -> None:
        """Nothing to prepare."""

    def exchange(self) -> None:
        """Measure, and write it down."""
        seen = measure_cluster.on_rank(self._rank, self.world, {})
        (self._folder / f"probe-{self._rank}.json").write_bytes(msgspec.json.encode(seen["lines"]))

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def run_here(strategy: Strategy, request: StrategyRequest) -> Ran:
    """Processes of this machine; raises RunError if they are not as many as were asked for."""
    folder = Path(request.folder)
    with _crew(strategy, request) as crew:
        crew.patience_s = PATIENCE_S
        crew.muster()
        crew.call("exchange")
    answers = read_answers(folder, request.workers)
    check_world(strategy.name, answers, request.workers)
    trace = folder / "trace.jsonl"
    return Ran(answers, folder / WEIGHTS, trace if trace.exists() else None)


def check_world(name: str, answers: list[Answer], workers: int) -> None:
    """Every worker has answered, and saw as many as there should be."""
    worlds = [answer.world for answer in answers]
    if worlds != [workers] * workers:
        raise RunError(f"{name} was asked for a world of {workers}, and its workers saw {worlds}.")


def probe(workers: int) -> dict[str, Any]:
    """What gloo's collectives take among so many workers here."""
    folder = tempfile.mkdtemp(prefix="paceline-bench-")
    stations = [partial(ProbeStation, folder, rank, workers) for rank in range(workers)]
    try:
        with BenchCrew("probe", stations) as crew:
            crew.muster()
            crew.call("exchange")
        lines: dict[str, Any] = decode_json((Path(folder) / "probe-0.json").read_bytes())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return lines


def _crew(strategy: Strategy, request: StrategyRequest) -> BenchCrew:
    if strategy.protocol is None:
        stations = [partial(TorchStation, request, strategy.name, rank) for rank in range(request.workers)]
        return BenchCrew(strategy.name, stations)
    dials = strategy.dials | {"settings": strategy.settings}
    load = ExchangeLoad(0, "sgd", request.workers, request.seed)
    if request.workers == 1:
        config = RunConfig(run="bench", folder=request.folder, protocol=strategy.protocol, **dials)
        return BenchCrew(strategy.name, [partial(OurStation, request, load, config, 0, None)])
    station = partial(OurStation, request)
    return paceline_crew(
        load, strategy.protocol, request.folder, station=station, serve=serve_noted, dials=dials
    )
