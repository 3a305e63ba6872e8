"""`paceline advise staleness`: how stale gradients may be, and how many workers are best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import errors_for_people, parse_slow, parse_weighting, print_json

if TYPE_CHECKING:
    from paceline.plan.curvature import Shape
    from paceline.plan.staleness import Advice, Observed, Request

WORKERS = "The workers"
MODEL = "The model"
TRAINING = "The training"


def staleness(
    run: Annotated[
        Path | None, typer.Option(help="Measure delays in this recorded run.", rich_help_panel=WORKERS)
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Model delays by this cluster file.", rich_help_panel=WORKERS)
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="How many there are.", rich_help_panel=WORKERS)
    ] = None,
    slow: o.Slow = None,
    compute_time: Annotated[
        float, typer.Option(help="Seconds of an iteration, without --run.", rich_help_panel=WORKERS)
    ] = 0.1,
    jitter: Annotated[
        float, typer.Option(help="Its relative spread (lognormal).", rich_help_panel=WORKERS)
    ] = 0.0,
    shared_time: Annotated[
        float | None,
        typer.Option(
            help="Seconds each push occupies the store or a link that all share.", rich_help_panel=WORKERS
        ),
    ] = None,
    triggered: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of gradients that are pushed, as with `train --trigger`. Default: the run's.",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="Measure curvature, noise and loss: a file with model(), data(), loss(model, batch).",
            rich_help_panel=MODEL,
        ),
    ] = None,
    after: Annotated[
        int, typer.Option(help="Measure after so many steps of one worker.", rich_help_panel=MODEL)
    ] = 0,
    curvature: Annotated[
        float | None, typer.Option(help="Largest Hessian eigenvalue.", rich_help_panel=MODEL)
    ] = None,
    curvature_min: Annotated[
        float | None, typer.Option(help="Curvature that limits the speed.", rich_help_panel=MODEL)
    ] = None,
    noise: Annotated[
        float | None, typer.Option(help="Variance of one worker's gradient.", rich_help_panel=MODEL)
    ] = None,
    loss: Annotated[
        float | None, typer.Option(help="Loss at the start, above the lowest.", rich_help_panel=MODEL)
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate, as the script has it.", rich_help_panel=TRAINING)
    ] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of SGD.", rich_help_panel=TRAINING)] = None,
    weighting: Annotated[
        str | None,
        typer.Option(
            metavar="mean|sum|NUMBER",
            help="How far one push moves the weights, as for `train`. Default: the run's, or mean.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    target_loss: Annotated[
        float | None, typer.Option(help="Advise the soonest to reach this loss.", rich_help_panel=TRAINING)
    ] = None,
    safety: Annotated[
        float, typer.Option(help="Share of the bound to keep within.", rich_help_panel=TRAINING)
    ] = 0.7,
    seed: o.Seed = 0,
    apply: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the advice as settings that `train --advice FILE` takes."),
    ] = None,
    json: o.Json = False,
) -> None:
    """How stale may gradients be: stable learning rates, speed, error floor, how many workers.

    Holds for asynchronous training (asp), and for bounded staleness as a worst case. Says of every
    figure whether it was measured, modelled or given.

    Example: paceline advise staleness --recipe recipes/digits.py --workers 8 --jitter 0.2 --lr 0.1
    """
    with errors_for_people():
        observed = _observe(run, cluster, workers, parse_slow(slow or []), compute_time, jitter, seed)
        if shared_time is not None:
            observed = observed.sharing(shared_time)
        if triggered is not None:
            observed = observed.triggering(triggered)
        given = {
            "lr": lr,
            "momentum": momentum,
            "curvature": curvature,
            "curvature_min": curvature_min,
            "noise": noise,
            "loss": loss,
            "target_loss": target_loss,
            "weighting": None if weighting is None else parse_weighting(weighting),
            "safety": safety,
        }
        advice = _advise(observed, given, recipe, after, seed)
        if apply is not None:
            from paceline.plan.staleness.follow import write_advice

            write_advice(apply, advice.follow)
        if json:
            print_json(advice)
        else:
            from rich.console import Console

            from paceline.plan.staleness.tables import everything

            Console(highlight=False).print(everything(advice))


def _observe(
    run: Path | None,
    cluster: Path | None,
    workers: int | None,
    slow: dict[int, float],
    compute_s: float,
    jitter: float,
    seed: int,
) -> Observed:
    from paceline.errors import ConfigError
    from paceline.plan.staleness import from_cluster, from_run
    from paceline.plan.staleness.observe import triggered_share
    from paceline.sim.request import ClusterRequest

    if run is not None and cluster is not None:
        raise ConfigError("delays come from --run or from --cluster, not from both. Give one.")
    if run is not None and workers is None and not slow:
        return from_run(run)
    if run is None and cluster is None and workers is None:
        raise ConfigError("whose delays? Give --run RUN, --cluster FILE, or --workers N.")
    request = ClusterRequest(
        file=str(cluster) if cluster else None,
        run=str(run) if run else None,
        workers=workers,
        slow=slow,
        compute_s=compute_s,
        jitter=jitter,
    )
    source = str(cluster or run or f"{compute_s:g} s each")
    observed = from_cluster(request.cluster(), source, seed)
    return observed if run is None else replace(observed, triggered=triggered_share(run))


def _advise(observed: Observed, given: dict[str, Any], recipe: Path | None, after: int, seed: int) -> Advice:
    from paceline.plan.staleness import advise as all_advice
    from paceline.plan.staleness import landscape

    shape: Shape | None = None
    found: dict[str, float] = {}
    if recipe is not None:
        shape, found = _measure(recipe, given, after, seed)
    request = _request(given, found)
    with _bar() as bar:
        return all_advice(observed, landscape(request, shape), request, lambda share: bar("advising", share))


def _measure(recipe: Path, given: dict[str, Any], after: int, seed: int) -> tuple[Shape, dict[str, float]]:
    """The loss around the recipe's weights, and its optimizer's settings if it has one."""
    from paceline.plan.curvature import measure_shape
    from paceline.plan.recipe import load_recipe

    with _bar() as bar:
        bar("reading the recipe", 0.0)
        loaded = load_recipe(recipe)
        found = loaded.settings()
        request = _request(given, found)
        shape = measure_shape(
            loaded, after=after, lr=request.lr, momentum=request.momentum, seed=seed, progress=bar
        )
    return shape, found


def _request(given: dict[str, Any], found: dict[str, float]) -> Request:
    """What the command gave; else what the recipe's own optimizer has."""
    from paceline.plan.staleness import Request

    own = {name: given[name] if given[name] is not None else found.get(name) for name in ("lr", "momentum")}
    return Request(**given | {"lr": own["lr"], "momentum": own["momentum"] or 0.0})


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """One line of progress on standard error, for what may take longer than two seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
