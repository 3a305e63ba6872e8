"""`paceline train`: one script, N workers, one protocol."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.flags import dials as d
from paceline.cli.flags import options as o
from paceline.cli.flags.dials import Dials, takes
from paceline.cli.running.advised import advised
from paceline.cli.running.common import (
    check_script,
    errors_for_people,
    new_run,
    parse_settings,
    print_json,
)
from paceline.cli.running.engines import check_engine, open_engine
from paceline.cli.running.mesh import check_known, check_split, is_split, resolved_mesh
from paceline.engines import ENGINES

LARGE_BYTES = 1 << 30
"""Checking so much takes seconds, so it is told."""


@takes(
    "workers",
    "mesh",
    *d.RUN,
    *d.NUMBERS,
    "balance",
    "compress",
    *d.TROUBLE,
    *d.KEEPING,
    *d.ENGINE,
    *d.HOSTS,
    workers=2,
    correct="auto",
)
def train(
    context: typer.Context,
    script: o.Script,
    args: o.Args = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            "--protocol",
            "-p",
            help="How the workers keep step: a name, or a class of your own, my_rules.py:HalfWay. Default: "
            "what the script names, else bsp.",
            rich_help_panel=o.PROTOCOL,
        ),
    ] = None,
    set_: o.Set = None,
    *,
    dials: Dials,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Go on from the checkpoint of a run that did not finish, with its flags unless given anew.",
            rich_help_panel=o.TRAINING,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Shard the model as a file of `paceline plan` says, instead of keeping step by a protocol.",
            rich_help_panel=o.TRAINING,
        ),
    ] = None,
    plan_cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --plan: the cluster as it is now. Refused if it is not the one that was planned for.",
            rich_help_panel=o.TRAINING,
        ),
    ] = None,
    advice: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Follow a file of `paceline advise staleness --apply FILE`; flags given here win.",
            rich_help_panel=o.PROTOCOL,
        ),
    ] = None,
    runs: o.Runs = Path("runs"),
    json: o.Json = False,
) -> None:
    """Train SCRIPT on several workers, of this machine or others.

    The script is an ordinary one: it calls paceline.join() and pace.prepare(model, optimizer, loader).
    Results go to a new folder under runs/: config, trace, result, weights as safetensors.

    A TOML file may stand for SCRIPT and flags, which are its keys: paceline train run.toml.

    Example: paceline train digits.py --protocol ssp --workers 4 --slow 3:2.5
    """
    from paceline.engines.torchrun import telling

    with errors_for_people():
        with telling():
            _check_script(script)
        if plan is not None:
            from paceline.cli.running.planned import train_planned

            chosen = {"script": str(script), "args": tuple(args or ()), "plan": str(plan.resolve())}
            asked = dials.asked()
            kept = ("workers", "seed", "clip_norm", "slow", "device_time_s", "jitter")
            chosen |= {key: asked[key] for key in kept}
            return train_planned(chosen, plan, plan_cluster, _flags(context), runs, json)
        asked = dials.asked() | {"protocol": protocol, "settings": parse_settings(set_ or [])}
        asked |= {
            "plain": dials["tls"] is False,
            "script": str(script),
            "args": tuple(args or ()),
        }
        followed = advised(advice, asked, _typed(context))
        typed = _typed(context) | followed.keys()
        asked |= followed
        if resume is None or _is_told():
            asked |= _fitting(asked, "workers" in typed)
        else:
            with telling():
                asked = _as_before(resume, asked, typed)
                asked |= _fitting(asked, "workers" in typed)
        _run(asked, runs, json, dials["secret_file"])
    return None


def _check_script(script: Path) -> None:
    if not _is_told():  # it would say so to nobody while the others wait for it
        check_script(script)


def _is_told() -> bool:
    """Whether this is a worker of torchrun's that hears from rank 0 what to run, maybe on another host."""
    from paceline.engines import torchrun

    return torchrun.launched() and torchrun.rank() > 0


def _as_worker(asked: dict[str, Any], runs: Path) -> None:
    """This process is a worker that torchrun started: take part, with these flags."""
    from paceline.engines.torchrun import await_summary, take_part
    from paceline.runtime.script import run_script

    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    seat = take_part(asked, runs)
    status = run_script(seat, max(1, cores), conducted=False)
    await_summary(status == 0)
    if status and seat.config.mesh is not None:  # gloo aborts a process whose threads still wait for others
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise typer.Exit(status)


def _run(asked: dict[str, Any], runs: Path, json: bool, secret_file: Path | None = None) -> None:
    from paceline.engines import torchrun

    if torchrun.launched():
        _check_words(asked)
        _as_worker(asked, runs)
    from paceline.cli.running.conduct import conduct
    from paceline.cli.running.ending import check_ranks

    config = make_config(asked, runs)
    if not ENGINES[config.engine].places:
        warn_if_crowded(config.near, config.device_time_s)
    secret = _secret(config, secret_file)
    with open_engine(asked) as engine:
        result = conduct(engine, config, secret=secret)
    if json:
        print_json(result)
    else:
        from rich.console import Console

        from paceline.view.terminal.table import summary

        Console(stderr=True).print(summary(result))
        print(f"draw it: paceline report {config.folder}", file=sys.stderr)
        print(f"{config.folder}")
    check_ranks(config, result)


def _secret(config: Any, file: Path | None) -> str:
    if config.listen is None and file is None:
        return ""
    from paceline.cli.running.secret import secret_for

    return secret_for(config.path, file)


def _flags(context: typer.Context) -> set[str]:
    """The flags that were given, on the command line or in a file."""
    return {name for name in context.params if _was_typed(context, name)}


def _typed(context: typer.Context) -> set[str]:
    """The configuration fields that were given on the command line."""
    names = d.fields() | {"set_": "settings"}
    fields = {names.get(name, name) for name in _flags(context)}
    return fields | ({"plain"} if "tls" in fields else set())


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")


def _as_before(run: Path, asked: dict[str, Any], typed: set[str]) -> dict[str, Any]:
    """A resumed run keeps its configuration, but for what was typed."""
    from paceline.config import config_of

    checkpoint = find_checkpoint(run)
    old = config_of(run if (run / "config.json").is_file() else checkpoint.parent)
    kept = {field: getattr(old, field) for field in asked if field not in typed}
    return asked | kept | {"resume": str(checkpoint)}


def _fitting(asked: dict[str, Any], typed: bool) -> dict[str, Any]:
    """Protocol, mesh and number of workers (`typed`: by hand), checked against each other before anything is
    started."""
    protocol, settings = asked["protocol"], asked["settings"]
    check_known(protocol)
    axes, workers = resolved_mesh(asked["mesh"], protocol, asked["workers"], typed)
    sha256 = ""
    if axes is None and not is_split(protocol):
        every = None if workers == 1 else asked["checkpoint_every"]
        among = asked["compress"], asked["fabric"], every, asked["store_hosts"]
        protocol, sha256 = checked_protocol(protocol, settings, *among)
    else:
        check_split(protocol, settings, axes)
    return {"mesh": axes, "workers": workers, "protocol": protocol, "protocol_sha256": sha256}


def make_config(asked: dict[str, Any], runs: Path) -> Any:
    """A checked configuration in a new run folder."""
    import msgspec

    from paceline.config import RunConfig
    from paceline.errors import ConfigError
    from paceline.fabric.choice import check_hosts, encrypts
    from paceline.protocols.own import digest, short

    asked = asked | {"protocol_sha256": digest(asked.get("protocol"))}
    if encrypts(asked.get("listen"), asked.get("fabric", "shared"), asked.get("plain", False)):
        asked = asked | {"tls": True}
    _check_words(asked)
    check_engine(asked)
    try:
        config = msgspec.convert({"correct": "auto"} | asked | {"run": "", "folder": ""}, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{str(error).rstrip('.')}.") from None
    check_hosts(config.fabric, config.near < config.workers)
    run, folder = new_run(runs, short(config.protocol or "script"))
    return msgspec.structs.replace(config, run=run, folder=str(folder))


def _check_words(asked: dict[str, Any]) -> None:
    """Flags that take one of a few words."""
    from typing import Literal, get_args, get_origin, get_type_hints

    from paceline.config import RunConfig
    from paceline.errors import unknown

    for field, kind in get_type_hints(RunConfig).items():
        if get_origin(kind) is Literal and field in asked and asked[field] not in get_args(kind):
            raise unknown(f"--{field.replace('_', '-')}", str(asked[field]), get_args(kind))
    if asked.get("engine", "local") not in ENGINES:
        raise unknown("--engine", str(asked["engine"]), ENGINES)


def checked_protocol(
    name: str | None,
    settings: dict[str, Any],
    compress: str = "none",
    fabric: str = "shared",
    every: str | None = None,
    store_hosts: int = 1,
) -> tuple[str | None, str]:
    """Find a misspelt protocol or setting, or what it cannot use, before anything is started. Returns the
    protocol's name, and the SHA-256 of its file if it is one of the user's own."""
    from paceline.fabric.choice import check_fabric, check_store_hosts
    from paceline.protocols.own import canonical, digest
    from paceline.protocols.rules.compression import check_family, parse_compression
    from paceline.protocols.rules.steady import check_steady
    from paceline.protocols.settings import make_any

    parse_compression(compress)
    if name is not None:
        name = canonical(name)
        protocol = make_any(name, settings)
        check_family(compress, name, protocol)
        check_fabric(fabric, name, protocol, compress)
        check_store_hosts(store_hosts, name, protocol)
        check_steady(every, name, protocol)
    return name, digest(name)


def find_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run folder that is not damaged, or the folder itself."""
    from paceline.errors import ConfigError
    from paceline.store.disk.checksums import verify
    from paceline.store.disk.folders import is_checkpoint

    run = run.resolve()  # `latest` is about to point elsewhere
    if is_checkpoint(run):
        verify(run)
        return run
    folder = _newest_sound(run)
    if folder is None:
        if _has_finished(run):
            raise ConfigError(
                f"{run} finished, so there is nothing to resume. Leave --resume out to train anew."
            )
        raise ConfigError(
            f"no checkpoint in {run}. Only a run that was stopped or failed leaves one, or one that was "
            "killed and had --checkpoint-every."
        )
    return folder


def _has_finished(run: Path) -> bool:
    from paceline.errors import TraceError
    from paceline.trace import read_trace, tally

    try:
        end = tally(read_trace(run)).end
    except TraceError:
        return False
    return end is not None and end.status == "finished"


def _newest_sound(run: Path) -> Path | None:
    """Of the run's own checkpoints, or else what it began with; damaged ones are named."""
    from paceline.store.disk.checksums import DamagedCheckpoint, newest_sound, size_of, verify
    from paceline.store.disk.folders import saved_in

    newest = saved_in(run)
    if newest is not None and size_of(newest) > LARGE_BYTES:
        print(f"checking the {size_of(newest) / 1e9:.1f} GB of {newest}", file=sys.stderr, flush=True)
    try:
        folder, damages = newest_sound(run)
    except DamagedCheckpoint as error:
        folder, damages = _began_with(run), [str(error)]
        if folder is None:
            raise
        damages = [f"{error} Going on from what the run began with, {folder}."]
    folder = folder or _began_with(run)
    if folder is not None and folder.parent != run:
        verify(folder)
    for text in damages:
        print(f"warning: {text}", file=sys.stderr, flush=True)
    return folder


def _began_with(run: Path) -> Path | None:
    """The checkpoint that a run went on from, if it did not come to its end without one of its own."""
    from paceline.config import config_of
    from paceline.store.disk.folders import is_checkpoint, saved_in

    ended = (run / "weights.safetensors").exists() and saved_in(run) is None
    known = not ended and (run / "config.json").is_file()
    resumed = config_of(run).resume if known else None
    return Path(resumed) if resumed is not None and is_checkpoint(Path(resumed)) else None


def warn_if_crowded(workers: int, device_time_s: float | None) -> None:
    """More workers than cores measure the machine, not the protocol."""
    cores = os.cpu_count() or 1
    if workers > cores and device_time_s is None:
        print(
            f"warning: {workers} workers share {cores} cores, so their speeds depend on each other. "
            "For a fair comparison give each a device of its own with --device-time SECONDS.",
            file=sys.stderr,
        )
