"""`paceline simulate`: the same protocols in virtual time, with or without real training."""

from __future__ import annotations

import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.flags import options as o
from paceline.cli.flags.dials import Dials, takes
from paceline.cli.running.common import (
    check_script,
    errors_for_people,
    new_run,
    parse_settings,
    parse_slow,
    print_json,
)
from paceline.cli.running.mesh import is_split, simulate_split
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.cli.compare import Wanted
    from paceline.protocols import Pacing, Peer
    from paceline.protocols.rules.slow_parking import SlowParking
    from paceline.sim import Cluster
    from paceline.sim.request import ClusterRequest
    from paceline.trace import Result

CLUSTER = "The cluster"


@takes(
    *("seed", "target", "weighting", "damping", "drop_staler", "lr_cap", "trigger", "trigger_most", "park"),
    *("park_slow", "apply", "correct", "shards"),
)
def simulate(
    script: Annotated[
        Path | None,
        typer.Argument(
            metavar="SCRIPT", help="Train this script for real, in virtual time. Without it: timing only."
        ),
    ] = None,
    args: o.Args = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            "--protocol",
            "-p",
            help="One or several, comma separated; settings after colons, +balance for balanced batches; one "
            "of your own as my_rules.py:HalfWay. Default: the script's, else dssp.",
        ),
    ] = None,
    set_: o.Set = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="Workers. Default: the cluster's, or 4.")
    ] = None,
    mesh: o.Mesh = None,
    iterations: Annotated[int, typer.Option(help="Iterations per worker, on average (timing only).")] = 100,
    cluster: o.ClusterFile = None,
    like: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Draw compute times from a recorded run.", rich_help_panel=CLUSTER),
    ] = None,
    slow: o.Slow = None,
    compute_time: Annotated[
        float, typer.Option(help="Seconds of an iteration.", rich_help_panel=CLUSTER)
    ] = 0.1,
    jitter: Annotated[
        float, typer.Option(help="Relative spread (lognormal).", rich_help_panel=CLUSTER)
    ] = 0.0,
    latency: Annotated[float, typer.Option(help="Seconds each way.", rich_help_panel=CLUSTER)] = 0.0,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bytes per second of a worker's link.", rich_help_panel=CLUSTER)
    ] = None,
    model_bytes: Annotated[
        int | None, typer.Option(help="Size of the weights.", rich_help_panel=CLUSTER)
    ] = None,
    apply_time: Annotated[
        float, typer.Option(help="Seconds the store needs per push.", rich_help_panel=CLUSTER)
    ] = 0.0,
    batch: Annotated[
        int, typer.Option(help="Samples behind one push (timing only).", rich_help_panel=CLUSTER)
    ] = 1,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate that --park-slow is about (timing only).", rich_help_panel=CLUSTER),
    ] = None,
    correct: o.EachCorrect = "auto",
    *,
    dials: Dials,
    balance: o.Balance = False,
    compress: o.EachCompress = "none",
    report: Annotated[Path | None, typer.Option(help="Also write an HTML report.")] = None,
    runs: o.Runs = Path("runs"),
    json: o.Json = False,
) -> None:
    """Simulate protocols on a cluster of any size.

    The result tells who waits, for how long, and how stale gradients are.

    The protocol objects are those of a real run. With SCRIPT, real gradients are computed by real
    workers under a virtual clock, so that accuracy against simulated time is exact and repeatable.

    Example: paceline simulate --protocol bsp,ssp,dssp,asp --workers 8 --slow 1:3
    """
    with errors_for_people():
        from paceline.sim.request import ClusterRequest

        request = ClusterRequest(
            file=str(cluster) if cluster else None,
            run=str(like) if like else None,
            workers=workers,
            slow=parse_slow(slow or []),
            compute_s=compute_time,
            jitter=jitter,
            latency_s=latency,
            bandwidth_bytes_per_s=bandwidth,
            apply_s=apply_time,
            model_bytes=model_bytes,
            batch=batch,
        )
        named = protocol or ("dssp" if script is None else "")
        ways = correct if script is not None else "none"
        wanted = _wanted(named, parse_settings(set_ or []), balance, compress, ways)
        common = dials.asked()
        split = [each for each in wanted if is_split(each.name)]
        _check_used(lr, common, script)
        if split or mesh is not None:
            _check_split(
                dials, {"balance": balance, "compress": compress != "none", "correct": correct != "auto"}
            )
        if split and script is not None:
            raise ConfigError(
                f"protocol {split[0].name!r} with a script runs in real time only: use paceline train."
            )
        if split or mesh is not None:
            done = simulate_split(request, wanted, mesh, iterations, dials["seed"], runs)
        elif script is None:
            _tell_unused(dials, correct)
            done = _timing_only(request, wanted, iterations, common | {"lr": lr}, runs)
        else:
            done = _exact(script, tuple(args or ()), request, wanted, common, runs)
        _answer(done, report, json)


def _check_used(lr: float | None, common: dict[str, Any], script: Path | None) -> None:
    """Refuse what this simulation would not look at."""
    if lr is not None and script is not None:
        raise ConfigError(
            f"--lr {lr:g}: a script has a rate of its own. Give it one after --, if it takes one."
        )
    if lr is not None and common["park_slow"] is None:
        raise ConfigError(f"--lr {lr:g} is only looked at by --park-slow. Leave it out.")


def _check_split(dials: Dials, others: dict[str, bool]) -> None:
    """A split model is simulated with its mesh, its cluster and a seed, and nothing else."""
    given = [name for name in dials.changed() if name != "seed"]
    for name in (*given, *(name for name, asked in others.items() if asked)):
        raise ConfigError(
            f"the simulation of a split model does not look at --{name.replace('_', '-')}. Leave it out."
        )


def _tell_unused(dials: Dials, correct: str) -> None:
    """Say which flags change nothing where no gradient is computed."""
    park_slow = dials["park_slow"] is not None
    about = ("target", "damping", "lr_cap", *(() if park_slow else ("weighting",)))
    unused = [name for name in about if name in dials.changed()] + ["correct"] * (correct != "auto")
    if unused:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        told = "changes" if len(unused) == 1 else "change"
        print(
            f"note: {flags} {told} nothing: a simulation of times computes no gradients. Name a SCRIPT to "
            "train in virtual time.",
            file=sys.stderr,
        )


def _wanted(named: str, settings: dict[str, Any], balance: bool, compress: str, correct: str) -> list[Wanted]:
    """The runs that were asked for; one under the script's own protocol, if none is named."""
    from paceline.cli.compare import Wanted, parse_protocols, with_corrections, with_each

    wanted = parse_protocols(named, "--protocol") if named else [Wanted(None, {})]
    wanted = [Wanted(x.name, x.settings | settings, x.balance or balance) for x in wanted]
    return with_corrections(with_each(wanted, compress), correct)


def _timing_only(
    request: ClusterRequest,
    wanted: list[Wanted],
    iterations: int,
    common: dict[str, Any],
    runs: Path,
) -> list[tuple[Result, Path]]:
    from paceline.protocols.rules.compression import check_family, parse_compression
    from paceline.protocols.settings import make_any
    from paceline.sim.balanced import check_balance
    from paceline.sim.compute import require

    cluster = request.cluster()
    require(iterations >= 1, "iterations must be >= 1", iterations, "Use --iterations 100, say.")
    if common["trigger"] is not None:
        raise ConfigError(
            f"--trigger {common['trigger']:g} looks at norms of gradients, and a simulation of times has "
            "none. Name a SCRIPT to train in virtual time."
        )
    if any(each.balance for each in wanted):
        check_balance(cluster.batch, common["shards"] != "shared")
    protocols = [(x, make_any(x.name, x.settings)) for x in wanted if x.name is not None]
    for each, protocol in protocols:
        parse_compression(each.compress)
        check_family(each.compress, each.name or "", protocol)
        _check_store(common, each.name or "", protocol)
        _check_park_slow(common, each, protocol)
    return [_simulated(each, protocol, cluster, iterations, common, runs) for each, protocol in protocols]


def _check_store(common: dict[str, Any], name: str, protocol: Pacing | Peer) -> None:
    """What only a store can do is refused, or told, where there is none."""
    from paceline.protocols import Peer, own
    from paceline.protocols.rules import increments

    if common["apply"] == "increments" and isinstance(protocol, Peer):
        raise increments.no_store(name)
    if common["apply"] == "increments" and not isinstance(protocol, Peer):
        increments.check_rule(name, protocol.lockstep, own.names_a_file(name))
    if isinstance(protocol, Peer) and common["park"]:
        raise ConfigError(
            f"protocol {name!r} is of the peer family, which cannot be parked. Leave --park out."
        )
    if isinstance(protocol, Peer) and common["drop_staler"] is not None:
        print(f"note: --drop-staler is ignored: {name!r} has no store", file=sys.stderr)


def _check_park_slow(common: dict[str, Any], each: Wanted, protocol: Pacing | Peer) -> None:
    """What a simulation of times has to be told before it can park slow workers."""
    from paceline.config import RunConfig
    from paceline.protocols import Peer
    from paceline.protocols.rules import slow_parking

    if common["park_slow"] is None:
        return
    if common["lr"] is None or common["lr"] <= 0:
        raise ConfigError(
            "--park-slow is about the learning rate, and a simulation of times has none. Give it one above 0 "
            "with --lr."
        )
    slow_parking.check(common["park_slow"], each.name or "", paced=not isinstance(protocol, Peer))
    asked = {name: common[name] for name in ("park_slow", "shards")}
    RunConfig(run="", folder="", workers=2, balance=each.balance, **asked)


def _parking(common: dict[str, Any]) -> SlowParking | None:
    from paceline.config import RunConfig
    from paceline.store.ledger import parking_of

    asked = {name: common[name] for name in ("weighting", "park_slow")}
    return parking_of(RunConfig(run="", folder="", workers=2, **asked), common["lr"])


def _simulated(
    each: Wanted,
    protocol: Pacing | Peer,
    cluster: Cluster,
    iterations: int,
    common: dict[str, Any],
    runs: Path,
) -> tuple[Result, Path]:
    """One run of sizes alone."""
    from paceline.cli.running.conduct import write_result
    from paceline.cli.running.virtual_bar import virtual_bar
    from paceline.protocols import Peer
    from paceline.protocols.own import short
    from paceline.protocols.rules.compression import parse_compression
    from paceline.sim import simulate as run_simulation
    from paceline.sim import simulate_peers
    from paceline.trace import TraceWriter

    run, folder = new_run(runs, f"sim-{short(each.name or '')}")
    with (
        closing(TraceWriter(folder / "trace.jsonl")) as trace,
        virtual_bar(f"simulating {each.title}") as progress,
    ):
        told: dict[str, Any] = {
            "iterations": iterations,
            "seed": common["seed"],
            "trace": trace.write,
            "progress": progress,
            "run": run,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        equal = common["shards"] != "shared"
        if isinstance(protocol, Peer):
            compress = parse_compression(each.compress)
            simulate_peers(protocol, cluster, compress=compress, equal_shards=equal, **told)
        else:
            told |= {name: common[name] for name in ("drop_staler", "park")} | {"balance": each.balance}
            run_simulation(protocol, cluster, equal_shards=equal, parking=_parking(common), **told)
    return write_result(folder), folder


def _exact(
    script: Path,
    args: tuple[str, ...],
    request: ClusterRequest,
    wanted: list[Wanted],
    common: dict[str, Any],
    runs: Path,
) -> list[tuple[Result, Path]]:
    import msgspec

    from paceline.cli.running.conduct import conduct
    from paceline.cli.running.ending import check_ranks
    from paceline.cli.running.engines import open_engine
    from paceline.cli.train import checked_protocol, make_config

    check_script(script)
    for each in wanted:
        checked_protocol(each.name, each.settings, each.compress)
    workers = request.cluster().workers
    plain = msgspec.to_builtins(request, str_keys=True)
    shared = common | {"script": str(script), "args": args, "workers": workers, "cluster": plain}
    done = []
    with open_engine(shared) as engine:
        for each in wanted:
            config = make_config(shared | each.dials, runs)
            done.append((conduct(engine, config), config.path))
            check_ranks(config, done[-1][0])
    return done


def _answer(done: list[tuple[Result, Path]], report: Path | None, json: bool) -> None:
    from rich.console import Console

    from paceline.view.terminal.table import print_comparison, summary

    results = [result for result, _ in done]
    if report is not None:
        from paceline.view.report.report import write_report

        print(f"report: {write_report([path for _, path in done], report)}", file=sys.stderr)
    if json:
        print_json(results if len(results) > 1 else results[0])
        return
    console = Console(stderr=True)
    if len(results) > 1:
        print_comparison(results, console)
    else:
        console.print(summary(results[0]))
        print(f"draw it: paceline report {done[0][1]}", file=sys.stderr)
    for _, path in done:
        print(path)
