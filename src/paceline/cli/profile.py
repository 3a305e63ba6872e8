"""`paceline profile`: measure a script's model, or the machines, for the planners."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import check_script, errors_for_people, parse_slow, print_json

if TYPE_CHECKING:
    from paceline.plan.profile import ClusterProfile, ModelProfile


def profile(
    script: Annotated[
        Path | None, typer.Argument(metavar="[SCRIPT]", help="The script whose model is measured.")
    ] = None,
    args: o.Args = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Measure the machine instead: workers, memory, collectives.")
    ] = False,
    workers: o.Workers = 4,
    slow: o.Slow = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File for the profile, as JSON.", dir_okay=False)
    ] = None,
    json: o.Json = False,
) -> None:
    """Measure a model or a cluster for `paceline plan`.

    SCRIPT is run up to its first step; then its layers are timed one by one. Profiles are JSON files that can
    also be written by hand; clusters also as TOML, with devices and links of a small catalogue.

    Example: paceline profile examples/digits.py --out digits.json
    """
    from paceline.errors import ConfigError

    with errors_for_people():
        if cluster == (script is not None):
            raise ConfigError(
                "profile measures a script's model or, with --cluster, the machine. Give one of them."
            )
        found = cluster_here(workers, parse_slow(slow or [])) if script is None else model_of(script, args)
        if out is not None:
            from paceline.plan.profile.files import write_json

            write_json(out, found)
        if json:
            print_json(found)
        else:
            _show(found)


def model_of(script: Path, args: list[str] | None = None) -> Any:
    """The profile of a script's model, measured now."""
    import contextlib
    import sys

    from paceline.cli.advise.staleness import _bar

    check_script(script)
    with _bar() as bar:
        bar("starting the script", 0.0)
        from paceline.parallel.plans.capture import capture
        from paceline.parallel.plans.measure_model import measure_model

        with contextlib.redirect_stdout(sys.stderr):
            captured = capture(script, tuple(args or ()))
        return measure_model(captured, script.stem, bar)


def cluster_here(workers: int, slow: dict[int, float]) -> Any:
    """The profile of so many workers on this machine, measured now."""
    from rich.console import Console

    from paceline.parallel.plans.measure_cluster import measure_cluster

    with Console(stderr=True).status(f"timing {workers} workers and their collectives"):
        return measure_cluster(workers, slow)


def check_model(script: Path | None, file: Path | None) -> None:
    """One of both says which model; looked at before anything is measured."""
    from paceline.errors import ConfigError

    if (script is None) == (file is None):
        raise ConfigError(
            "which model? Give a SCRIPT, or --profile FILE (made by `paceline profile SCRIPT --out FILE`), "
            "but not both."
        )
    if script is not None:
        check_script(script)


def profile_of(script: Path | None, args: list[str] | None, file: Path | None) -> ModelProfile:
    """A model's profile for a planner: read from a file, or measured now."""
    from paceline.plan.profile import load_model_profile

    if file is not None:
        return load_model_profile(file)
    assert script is not None
    found: ModelProfile = model_of(script, args)
    return found


def cluster_of(file: Path | None, workers: int | None, overhead: str | None = None) -> ClusterProfile:
    """A cluster's profile for a planner: read from a file, or measured now."""
    import msgspec

    from paceline.errors import ConfigError
    from paceline.plan.profile import load_cluster_profile
    from paceline.plan.profile.units import parse_size

    if workers is not None and workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {workers}.")
    if file is None:
        found: ClusterProfile = cluster_here(workers or 4, {})
    else:
        found = load_cluster_profile(file)
        found = found if workers is None else found.with_workers(workers)
    if overhead is not None:
        found = msgspec.structs.replace(found, overhead_bytes=parse_size(overhead, "--overhead"))
    return found


def _show(found: Any) -> None:
    from rich.console import Console

    from paceline.plan.profile.cluster import ClusterProfile
    from paceline.plan.profile.tables import cluster_table, model_table

    table = cluster_table(found) if isinstance(found, ClusterProfile) else model_table(found)
    Console(highlight=False).print(table)
