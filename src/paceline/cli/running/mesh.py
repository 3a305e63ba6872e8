"""`--mesh`: what of it can be said before anything is started."""

from __future__ import annotations

import os
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from paceline.cli.running.common import new_run

if TYPE_CHECKING:
    from paceline.cli.compare import Wanted
    from paceline.protocols.grid import Grid
    from paceline.sim import Cluster
    from paceline.sim.request import ClusterRequest
    from paceline.trace import Result


def is_split(protocol: str | None) -> bool:
    """Whether a protocol splits the model."""
    from paceline.parallel.registry import SPLITS

    return protocol in SPLITS


def check_known(protocol: str | None) -> None:
    """Find a misspelt name, and tell the names of all families: those that split a model, too."""
    from paceline.errors import unknown
    from paceline.parallel.registry import SPLITS
    from paceline.protocols import PACED, PEERS, own

    known = {*PACED, *PEERS, *SPLITS, *own.offered()}
    if protocol is not None and protocol not in known and not own.names_a_file(protocol):
        raise unknown("protocol", protocol, known)


def resolved_mesh(
    given: str | dict[str, int] | None, protocol: str | None, workers: int, typed: bool
) -> tuple[dict[str, int] | None, int]:
    """Axes and workers: a mesh names its workers; without one, a protocol that splits has its axis alone.

    `given` is as it was typed, or the axes of a run that is resumed."""
    from paceline.protocols.grid import Grid, parse_mesh

    if "WORLD_SIZE" in os.environ and os.environ["WORLD_SIZE"].isdecimal():  # torchrun has started us
        workers, typed = int(os.environ["WORLD_SIZE"]), True
    if given is not None:
        axes = parse_mesh(given) if isinstance(given, str) else given
        workers = workers if typed else Grid(axes).count
        return (axes if Grid(axes).count > 1 or workers > 1 else None), workers
    if protocol is None or not is_split(protocol) or workers == 1:
        return None, workers
    from paceline.parallel.registry import axis_of

    return {axis_of(protocol): workers}, workers


def check_split(protocol: str | None, settings: dict[str, Any], axes: dict[str, int] | None) -> None:
    """Find a misspelt protocol or setting, or delays that do not fit, before anything is started."""
    from paceline.errors import ConfigError
    from paceline.parallel.registry import ALONG, PIPELINES, SPLITS, check_along, make_pipeline, make_split
    from paceline.protocols.settings import make_any

    if protocol is None:
        return
    if protocol in PIPELINES:
        make_pipeline(protocol, settings).schedule((axes or {}).get("stage", 1))
        return
    if protocol in SPLITS:
        make_split(protocol, settings)
        return
    make_any(protocol, settings)
    if protocol not in ALONG:
        raise ConfigError(
            f"protocol {protocol!r} splits no model, as --mesh asks. Use one that does "
            f"({', '.join(sorted(SPLITS))}), one for copies along the axis data ({', '.join(ALONG)}), or "
            "leave --mesh out."
        )
    check_along(protocol, settings)


def simulate_split(
    request: ClusterRequest, wanted: list[Wanted], mesh: str | None, iterations: int, seed: int, runs: Path
) -> list[tuple[Result, Path]]:
    """Pipelines in virtual time, one after another."""
    from paceline.errors import ConfigError
    from paceline.parallel.registry import PIPELINES, make_pipeline
    from paceline.protocols.grid import Grid, check_workers, parse_mesh

    if request.workers is None and request.file is None and mesh is not None:
        request = structs.replace(request, workers=Grid(parse_mesh(mesh)).count)
    cluster = request.cluster()
    axes = parse_mesh(mesh) if mesh is not None else {"stage": cluster.workers}
    check_workers(axes, cluster.workers)
    others = [axis for axis in axes if axis not in ("data", "stage")]
    for each in wanted:
        if each.name not in PIPELINES:
            raise ConfigError(
                f"protocol {each.name!r} is no pipeline, and is not simulated on a mesh. Use one of: "
                f"{', '.join(sorted(PIPELINES))}."
            )
        if others:
            raise ConfigError(f"pipelines have the axes data and stage, got {Grid(axes)}.")
        make_pipeline(each.name or "", each.settings).schedule(axes.get("stage", 1))
    return [_simulated(each, Grid(axes), cluster, iterations, seed, runs) for each in wanted]


def _simulated(
    each: Wanted, grid: Grid, cluster: Cluster, iterations: int, seed: int, runs: Path
) -> tuple[Result, Path]:
    from paceline.cli.running.conduct import write_result
    from paceline.cli.running.virtual_bar import virtual_bar
    from paceline.parallel.pipeline.simulating import simulate_pipeline
    from paceline.parallel.registry import make_pipeline
    from paceline.trace import TraceWriter

    assert each.name is not None
    run, folder = new_run(runs, f"sim-{each.name}")
    with (
        closing(TraceWriter(folder / "trace.jsonl")) as trace,
        virtual_bar(f"simulating {each.title}") as progress,
    ):
        simulate_pipeline(
            each.name,
            make_pipeline(each.name, each.settings),
            grid,
            cluster,
            iterations=iterations,
            seed=seed,
            trace=trace.write,
            progress=progress,
            run=run,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    return write_result(folder), folder
