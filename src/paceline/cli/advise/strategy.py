"""`paceline advise strategy`: DDP, FSDP or a parameter store, for a model and a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import errors_for_people, print_json

if TYPE_CHECKING:
    from paceline.plan.strategy.models import Strategy

USUAL_BATCH = 32
"""For a profile that names no batch size."""


def strategy(
    script: Annotated[
        Path | None, typer.Argument(metavar="[SCRIPT]", help="Measure the model of this script.")
    ] = None,
    args: o.Args = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Take the model from this file of `paceline profile SCRIPT --out FILE`."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="The cluster: a file of `paceline profile --cluster --out FILE`, or TOML by hand. "
            "Default: workers on this machine, measured now."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="How many. Default: the cluster's; 4 without one.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples per worker and step. Default: the script's, or 32 if unknown."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Of a device, such as 8GiB. Default: the smallest device's.")
    ] = None,
    hosts: Annotated[int, typer.Option(help="Machines that the workers are on.")] = 1,
    most_workers: Annotated[
        int | None, typer.Option(min=1, help="How many workers could be had. Default: the cluster's.")
    ] = None,
    preemptible: Annotated[
        bool, typer.Option("--preemptible", help="Workers may come and go, as on spot machines.")
    ] = False,
    tolerance: Annotated[float, typer.Option(help="Points of accuracy that may be lost.")] = 0.0,
    measured: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STRATEGY=SAMPLES_PER_S", help="What was measured on this cluster, any number of times."
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """DDP, FSDP or a parameter store: the rule that decides, its numbers, and how the others would do.

    Example: paceline advise strategy examples/digits.py --workers 2
    """
    with errors_for_people():
        import msgspec

        from paceline.cli.profile import check_model, cluster_of, profile_of
        from paceline.plan.profile.units import parse_size
        from paceline.plan.strategy import Constraints, advise
        from paceline.plan.strategy.models import load_of

        wanted = Constraints(
            preemptible=preemptible,
            tolerance=tolerance,
            memory_bytes=None if memory is None else parse_size(memory, "--memory"),
            hosts=hosts,
            most_workers=most_workers,
            measured=dict(_measured(text) for text in measured or []),
        )
        check_model(script, profile)
        machines = cluster_of(cluster, workers)
        model = profile_of(script, args, profile)
        advice = advise(load_of(model, machines, batch or model.batch or USUAL_BATCH), wanted)
        advice = msgspec.structs.replace(advice, command=_typed(advice.command, script, cluster, workers))
        if json:
            print_json(advice)
        else:
            from rich.console import Console

            from paceline.plan.strategy.tables import advice_table

            Console(highlight=False).print(advice_table(advice))


def _typed(command: str, script: Path | None, cluster: Path | None, workers: int | None) -> str:
    """The command with what was given in the places of SCRIPT and FILE."""
    if script is not None:
        command = command.replace("SCRIPT", str(script))
    if cluster is not None:
        return command.replace("--cluster FILE", f"--cluster {cluster}")
    return command.replace("--cluster FILE", f"--workers {workers or 4}")


def _measured(text: str) -> tuple[Strategy, float]:
    from paceline.errors import ConfigError, unknown
    from paceline.plan.strategy.models import STRATEGIES

    name, _, figure = text.partition("=")
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    try:
        rate = float(figure)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ConfigError(f"--measured {name} needs samples per second above 0, got {figure!r}.")
    return name, rate
