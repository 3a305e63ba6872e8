"""`paceline tune`: settings that can only be found by training."""

from __future__ import annotations

import sys
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.flags import options as o
from paceline.cli.flags.dials import Dials, takes
from paceline.cli.running.common import check_script, errors_for_people, parse_slow, print_json
from paceline.errors import ConfigError, RunError, RunStopped

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.engines.engine import Engine
    from paceline.plan.switch import Key, ShareTrial, SwitchAnswer
    from paceline.trace import Result

SEARCH = "The search"
CLUSTER = "The cluster"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Find settings by training.")


@app.callback()
def tune() -> None:
    """Find settings by training."""


@app.command()
@takes("seed", "weighting", "schedule", "clip_norm")
def switch(
    script: o.Script,
    args: o.Args = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="Workers. Default: the cluster's, or 4.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="How much less accurate than BSP is enough.", rich_help_panel=SEARCH)
    ] = 0.01,
    settings: Annotated[int, typer.Option(help="Shares to try.", rich_help_panel=SEARCH)] = 5,
    runs_each: Annotated[int, typer.Option(help="Runs with each share.", rich_help_panel=SEARCH)] = 5,
    again: Annotated[
        bool, typer.Option("--again", help="Search although the answer is known.", rich_help_panel=SEARCH)
    ] = False,
    real: Annotated[
        bool, typer.Option("--real", help="Real runs instead of exact simulation.", rich_help_panel=SEARCH)
    ] = False,
    cluster: o.ClusterFile = None,
    slow: o.Slow = None,
    compute_time: Annotated[
        float | None,
        typer.Option(
            help="Seconds of an iteration. Default: 0.1, or what it takes with --real.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    jitter: Annotated[float, typer.Option(help="Its relative spread.", rich_help_panel=CLUSTER)] = 0.0,
    *,
    dials: Dials,
    runs: o.Runs = Path("runs"),
    json: o.Json = False,
) -> None:
    """Find when to switch from BSP to ASP: the least share of BSP that is nearly as accurate.

    A binary search that trains SCRIPT many times, by default in exact simulation: real gradients in
    virtual time. The script has to call pace.evaluate. The answer is kept in tuned.json in the folder
    of runs, and given at once when the same is asked again.

    Example: paceline tune switch examples/digits.py --workers 4 --slow 3:2.5 --runs-each 3
    """
    with errors_for_people():
        check_script(script)
        if cluster is not None and (real or compute_time is not None or jitter):
            raise ConfigError(
                f"the cluster is as {cluster} describes it. Leave out --real, --compute-time and --jitter."
            )
        shared = dials.asked() | {"script": str(script), "args": tuple(args or ())}
        slowed = parse_slow(slow or [])
        if real:
            shared |= {
                "workers": workers or 4,
                "slow": slowed,
                "jitter": jitter,
                "device_time_s": compute_time,
            }
        else:
            shared |= _simulated(cluster, workers, slowed, compute_time, jitter)
        searched = {"tolerance": tolerance, "settings": settings, "runs_each": runs_each}
        _answer(_tuned(shared, searched, runs, again), script, json)


def _simulated(
    file: Path | None, workers: int | None, slow: dict[int, float], compute_s: float | None, jitter: float
) -> dict[str, Any]:
    """What makes a run an exact simulation of a cluster."""
    import msgspec

    from paceline.sim.request import ClusterRequest

    request = ClusterRequest(
        file=str(file) if file else None,
        workers=workers,
        slow=slow,
        compute_s=0.1 if compute_s is None else compute_s,
        jitter=jitter,
    )
    return {"workers": request.cluster().workers, "cluster": msgspec.to_builtins(request, str_keys=True)}


def _tuned(shared: dict[str, Any], dials: dict[str, Any], runs: Path, again: bool) -> SwitchAnswer:
    from paceline.cli.running.engines import open_engine
    from paceline.plan.switch import keep, recall, search

    kept, key = runs / "tuned.json", _key(shared, dials)
    known = None if again else recall(kept, key)
    if known is not None:
        print(f"known from {kept}; --again searches anew", file=sys.stderr)
        return known
    tolerance, settings, runs_each = dials["tolerance"], dials["settings"], dials["runs_each"]
    with open_engine(shared) as engine:
        trainer = TuneTrainer(engine, shared, runs, runs_each * (settings + 1))
        found = search(trainer.train, tolerance=tolerance, settings=settings, runs=runs_each)
    keep(kept, key, found)
    return found


def _key(shared: dict[str, Any], dials: dict[str, Any]) -> Key:
    import msgspec

    from paceline.plan.switch import Key, script_digest
    from paceline.sim.request import ClusterRequest

    request, emulated = shared.get("cluster"), {"slow", "jitter", "device_time_s"}
    if request is not None:
        cluster = msgspec.convert(request, ClusterRequest, strict=False).cluster().describe()
    else:
        cluster = {name: shared[name] for name in sorted(emulated)}
        cluster["slow"] = {str(rank): factor for rank, factor in shared["slow"].items()}
    apart = {"script", "args", "workers", "cluster"} | emulated
    told = {name: value for name, value in shared.items() if name not in apart}
    return Key(
        script_digest(Path(shared["script"])), shared["args"], shared["workers"], cluster, told | dials
    )


class TuneTrainer:
    """Trains a script with a share of BSP. The first run is plain BSP, and tells how much work there is."""

    def __init__(self, engine: Engine, shared: dict[str, Any], runs: Path, most: int) -> None:
        self._engine = engine
        self._shared = shared
        self._runs = runs
        self._most = most
        self._made = 0
        self._work = 0

    def train(self, share: float, repetition: int) -> tuple[float, float]:
        """One run: accuracy (NaN if it diverged) and seconds."""
        from paceline.cli.running.conduct import write_result
        from paceline.cli.train import make_config

        self._made += 1
        self._say(f"run {self._made} of at most {self._most}: {100 * share:.4g} % BSP, seed +{repetition}")
        settings = {"phases": f"bsp@{share!r},asp", "total": self._work}
        own = {"seed": self._shared["seed"] + repetition, "protocol": "sync_switch", "settings": settings}
        config = make_config(self._shared | own, self._runs)
        try:
            result = self._run(config)
        except RunStopped:
            raise
        except RunError as error:
            if share == 1.0:
                raise
            self._say(f"counts as diverged: {error}")
            return nan, write_result(config.path).seconds
        return self._judged(result, share)

    def _run(self, config: Any) -> Result:
        from paceline.cli.running.conduct import conduct

        return conduct(self._engine, config)

    def _judged(self, result: Result, share: float) -> tuple[float, float]:
        if result.accuracy is None and share == 1.0:
            raise ConfigError(
                f"{self._shared['script']} reports no accuracy to compare. Call pace.evaluate(fn) with a "
                "function that returns it."
            )
        self._work = self._work or result.samples or 0
        return nan if result.accuracy is None else result.accuracy, result.seconds

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _answer(found: SwitchAnswer, script: Path, json: bool) -> None:
    from rich.console import Console

    if json:
        print_json(found)
        return
    console = Console(stderr=True, highlight=False)
    console.print(_table(found))
    pays = "never pays" if found.break_even is None else f"pays after {found.break_even} runs"
    console.print(
        f"{100 * found.share:.4g} % BSP is enough: a run takes {100 * found.time:.0f} % of BSP's time. "
        f"The search cost as much as {found.cost:.1f} runs of BSP, and {pays}."
    )
    if found.ended_by_chance:
        console.print("The last share's runs differ too much to tell: more --runs-each may find a lower one.")
    print(f"paceline train {script} --protocol sync_switch --set phases={found.phases}")


def _table(found: SwitchAnswer) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, caption=f"enough: at least {found.target:.4g}")
    table.caption_justify = "left"
    for heading in ("BSP", "accuracy", "time, BSP = 1", "enough"):
        table.add_column(heading, justify="right")
    for trial in found.trials:
        time = trial.time_s / found.trials[0].time_s
        table.add_row(f"{100 * trial.share:.4g} %", _accuracy(trial), f"{time:.2f}", _verdict(trial))
    return table


def _accuracy(trial: ShareTrial) -> str:
    spread = f" ± {trial.error:.2g}" if len(trial.accuracies) > 1 else ""
    return f"{trial.accuracy:.4f}{spread}"


def _verdict(trial: ShareTrial) -> str:
    return "chance" if trial.enough is None else "yes" if trial.enough else "no"
