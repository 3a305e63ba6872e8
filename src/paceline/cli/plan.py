"""`paceline plan`: a model and a cluster in, a sharding plan out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import errors_for_people, print_json

if TYPE_CHECKING:
    from paceline.plan.profile import ClusterProfile

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Plan how to shard a model over a cluster."
)

Script = Annotated[Path | None, typer.Argument(metavar="[SCRIPT]", help="Measure the model of this script.")]
Profile = Annotated[
    Path | None, typer.Option("--profile", help="Take the model from this file of `paceline profile`.")
]
Cluster = Annotated[
    Path | None,
    typer.Option("--cluster", help="The cluster: a file of `paceline profile --cluster`, or TOML by hand."),
]
Workers = Annotated[
    int | None, typer.Option("--workers", "-n", help="How many; without --cluster they are measured here.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="File for the plan, as JSON.", dir_okay=False)]


@app.callback()
def plan() -> None:
    """Plan how to shard a model over a cluster."""


@app.command()
def osdp(
    script: Script = None,
    args: o.Args = None,
    profile: Profile = None,
    cluster: Cluster = None,
    workers: Workers = None,
    memory: Annotated[
        str | None, typer.Option(help="Limit per device, such as 8GiB. Default: the smallest device's.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Samples per worker. Default: the script's; for a profile that names none, as --best-batch."
        ),
    ] = None,
    best_batch: Annotated[
        bool, typer.Option("--best-batch", help="Take the batch size with most samples per second.")
    ] = False,
    modes: Annotated[str, typer.Option(help="Ways to treat an operator: dp, zdp, keep.")] = "dp,zdp",
    slices: Annotated[
        int, typer.Option(help="Cut linear layers into up to so many slices, where that helps.")
    ] = 1,
    split: Annotated[
        list[str] | None, typer.Option(metavar="OPERATOR:SLICES", help="Cut just this operator.")
    ] = None,
    overhead: Annotated[
        str | None, typer.Option(help="Taken on every device before the first tensor, such as 800MiB.")
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Count communication as hidden by computing.")
    ] = False,
    out: Out = None,
    json: o.Json = False,
) -> None:
    """Decide for every layer whether it is replicated or sharded, so that the model fits and runs fastest.

    Example: paceline plan osdp examples/digits.py --workers 4 --memory 1GiB --out plan.json
    """
    from paceline.cli.profile import check_model, cluster_of, profile_of
    from paceline.plan.osdp.scheduler import plan_osdp

    with errors_for_people():
        ways = _ways(modes, slices, split or [], overlap)
        limit = _limit(memory, batch, best_batch)
        check_model(script, profile)
        machines = cluster_of(cluster, workers, overhead)
        model = profile_of(script, args, profile)
        if batch is None and not best_batch:
            batch = model.batch
        found = plan_osdp(model, machines, limit, batch, **ways)
        _deliver(found, out, json)


@app.command()
def hap(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The script whose model is cut up.")],
    args: o.Args = None,
    cluster: Cluster = None,
    workers: Workers = None,
    segments: Annotated[
        int, typer.Option(help="Parts of the model that may each have ratios of their own.")
    ] = 1,
    overhead: Annotated[
        str | None, typer.Option(help="Taken on every device before the first tensor, such as 800MiB.")
    ] = None,
    out: Out = None,
    json: o.Json = False,
) -> None:
    """Cut a model over unequal devices: a program of operations and collectives, and how much each device
    does.

    The script's batch is the whole step's: all devices work on it together.

    Example: paceline plan hap examples/transformer.py --cluster examples/plans/unequal_gpus.toml
    -- --width 512 --experts 16 --batch-size 512
    """
    with errors_for_people():
        from paceline.cli.profile import cluster_of
        from paceline.errors import ConfigError

        if segments < 1:
            raise ConfigError(f"--segments must be at least 1, got {segments}.")
        machines = cluster_of(cluster, workers, overhead)
        found = _cut_up(script, args, machines, segments)
        if json and found.better() is not None:
            print(f"warning: {found.verdict()}.", file=sys.stderr)
        _deliver(found, out, json)


def _cut_up(script: Path, args: list[str] | None, machines: ClusterProfile, segments: int) -> Any:
    import contextlib

    from rich.console import Console

    from paceline.cli.running.common import check_script

    check_script(script)
    with Console(stderr=True).status("starting the script"):
        from paceline.parallel.plans.capture import capture
        from paceline.parallel.plans.measure_model import state_copies
        from paceline.plan.hap.plan import plan_hap
        from paceline.plan.hap.trace import by_position, trace

        with contextlib.redirect_stdout(sys.stderr):
            captured = capture(script, tuple(args or ()))
        args_ = by_position(captured.model.forward, captured.args, captured.kwargs)
        graph = trace(captured.model, args_).graph
        copies = 2 + state_copies(captured.optimizer)
    with Console(stderr=True).status(f"searching a program of {len(graph.nodes)} nodes"):
        return plan_hap(graph, machines, script.stem, captured.batch, copies, segments)


def _limit(memory: str | None, batch: int | None, best_batch: bool) -> int | None:
    """Bytes of a device, if told; looked at before anything is measured, as the batch is."""
    from paceline.errors import ConfigError
    from paceline.plan.profile.units import parse_size

    if batch is not None and batch < 1:
        raise ConfigError(f"--batch must be at least 1, got {batch}.")
    if batch is not None and best_batch:
        raise ConfigError(f"--batch {batch} and --best-batch exclude each other. Give one of them.")
    return None if memory is None else parse_size(memory, "--memory")


def _ways(modes: str, slices: int, split: list[str], overlap: bool) -> dict[str, Any]:
    from paceline.errors import ConfigError, unknown

    chosen = tuple(mode.strip() for mode in modes.split(",") if mode.strip())
    for mode in chosen:
        if mode not in ("dp", "zdp", "keep"):
            raise unknown("mode", mode, ("dp", "zdp", "keep"))
    if not chosen or slices < 1:
        raise ConfigError(
            f"--modes names at least one mode and --slices is at least 1, got {modes!r}, {slices}."
        )
    counts = tuple(sorted({2**i for i in range(slices.bit_length())} | {slices}))
    given = {}
    for item in split:
        name, _, count = item.rpartition(":")
        if not name or not count.isdigit():
            raise ConfigError(f"--split takes OPERATOR:SLICES, got {item!r}. For instance --split fc1:4.")
        given[name] = int(count)
    return {"modes": chosen, "slices": counts, "split": given, "overlap": overlap}


def _deliver(found: Any, out: Path | None, json: bool) -> None:
    from rich.console import Console

    from paceline.plan.hap.tables import everything as of_hap
    from paceline.plan.osdp.tables import everything as of_osdp
    from paceline.plan.profile.files import write_json

    if out is not None:
        write_json(out, found)
    if json:
        print_json(found)
    else:
        Console(highlight=False).print(of_hap(found) if found.planner == "hap" else of_osdp(found))
