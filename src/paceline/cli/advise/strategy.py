"""`paceline advise strategy`: DDP, FSDP or a parameter store, for a model and a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import errors_for_people, print_json

if TYPE_CHECKING:
    from paceline.plan.strategy.models import Strategy


def strategy(
    profile: Annotated[Path, typer.Option(help="The model: a file of `paceline profile SCRIPT`.")],
    cluster: Annotated[
        Path, typer.Option(help="The cluster: a file of `paceline profile --cluster`, or TOML by hand.")
    ],
    batch: Annotated[int, typer.Option(min=1, help="Samples per worker and step.")] = 32,
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

    Example: paceline advise strategy --profile digits.json --cluster examples/plans/unequal_gpus.toml
    """
    with errors_for_people():
        from paceline.plan.profile import load_cluster_profile, load_model_profile
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
        advice = advise(load_of(load_model_profile(profile), load_cluster_profile(cluster), batch), wanted)
        if json:
            print_json(advice)
        else:
            from rich.console import Console

            from paceline.plan.strategy.tables import advice_table

            Console(highlight=False).print(advice_table(advice))


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
