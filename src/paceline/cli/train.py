"""`paceline train`: one script, N workers, one protocol."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options as o
from paceline.cli.common import (
    check_script,
    errors_for_people,
    new_run,
    parse_settings,
    parse_slow,
    parse_weighting,
    print_json,
)
from paceline.cli.engines import check_engine, open_engine
from paceline.cli.mesh import check_split, is_split, resolved_mesh

if TYPE_CHECKING:
    from paceline.config import RunConfig


def train(
    context: typer.Context,
    script: o.Script,
    args: o.Args = None,
    protocol: Annotated[
        str | None,
        typer.Option("--protocol", "-p", help="How the workers keep step. Default: what the script names."),
    ] = None,
    set_: o.Set = None,
    workers: o.Workers = 2,
    mesh: o.Mesh = None,
    slow: o.Slow = None,
    device_time: o.DeviceTime = None,
    jitter: o.Jitter = 0.0,
    seed: o.Seed = 0,
    target: o.Target = None,
    weighting: o.Weighting = "mean",
    damping: o.Damping = "none",
    schedule: o.Schedule = "samples",
    clip_norm: o.ClipNorm = None,
    shards: o.Shards = "shared",
    inject: o.Inject = "",
    fabric: o.Fabric = "shared",
    balance: o.Balance = False,
    compress: o.Compress = "none",
    bad_gradient: o.BadGradient = "stop",
    on_failure: o.OnFailure = "continue",
    checkpoint_every: o.CheckpointEvery = None,
    private_weights: o.PrivateWeights = False,
    engine: o.Engine = "local",
    address: o.Address = None,
    master: o.Master = None,
    listen: o.Listen = None,
    here: o.Here = None,
    store_hosts: o.StoreHosts = 1,
    host_patience: o.HostPatience = 30.0,
    secret_file: o.SecretFile = None,
    tls: o.Tls = False,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Go on from the checkpoint of a run that did not finish, with its flags unless given anew.",
        ),
    ] = None,
    runs: o.Runs = Path("runs"),
    json: o.Json = False,
) -> None:
    """Train SCRIPT on several worker processes, of this machine or wherever the engine places them.

    The script is an ordinary one: it calls paceline.join() and pace.prepare(model, optimizer, loader).
    Results go to a new folder under runs/: config, trace, result, weights as safetensors.

    Example: paceline train examples/digits.py --protocol ssp --workers 4 --slow 3:2.5
    """
    from paceline.engines.torchrun import telling

    with errors_for_people():
        with telling():
            _check_script(script)
        settings = parse_settings(set_ or [])
        axes, workers = resolved_mesh(mesh, protocol, workers, _was_typed(context, "workers"))
        every = None if workers == 1 else checkpoint_every
        if axes is None and not is_split(protocol):
            checked_protocol(protocol, settings, compress, fabric, every, store_hosts)
        else:
            check_split(protocol, settings, axes)
        asked = {
            "script": str(script),
            "args": tuple(args or ()),
            "workers": workers,
            "mesh": axes,
            "engine": engine,
            "address": address,
            "master": master,
            "listen": listen,
            "here": here,
            "store_hosts": store_hosts,
            "host_patience_s": host_patience,
            "tls": tls,
            "tls_cert": _path(tls_cert),
            "tls_key": _path(tls_key),
            "seed": seed,
            "target": target,
            "weighting": parse_weighting(weighting),
            "damping": damping,
            "schedule": schedule,
            "clip_norm": clip_norm,
            "shards": shards,
            "inject": inject,
            "fabric": fabric,
            "balance": balance,
            "compress": compress,
            "bad_gradient": bad_gradient,
            "on_failure": on_failure,
            "checkpoint_every": checkpoint_every,
            "private_weights": private_weights,
            "slow": parse_slow(slow or []),
            "device_time_s": device_time,
            "jitter": jitter,
            "protocol": protocol,
            "settings": settings,
        }
        if resume is not None and not _is_told():
            with telling():
                asked = _as_before(resume, asked, _typed(context))
        _run(asked, runs, json, secret_file)


def _check_script(script: Path) -> None:
    if not _is_told():  # it would say so to nobody while the others wait for it
        check_script(script)


def _is_told() -> bool:
    """Whether this is a worker of torchrun's that hears from rank 0 what to run, maybe on another host."""
    from paceline.engines import torchrun

    return torchrun.launched() and torchrun.rank() > 0


def _as_worker(asked: dict[str, Any], runs: Path) -> None:
    """This process is a worker that torchrun started: take part, with these flags."""
    from paceline.engines.torchrun import take_part
    from paceline.runtime.script import run_script

    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    raise typer.Exit(run_script(take_part(asked, runs), max(1, cores), conducted=False))


def _run(asked: dict[str, Any], runs: Path, json: bool, secret_file: Path | None = None) -> None:
    from paceline.engines import torchrun

    if torchrun.launched():
        _check_words(asked)
        _as_worker(asked, runs)
    from paceline.cli.conduct import conduct

    config = make_config(asked, runs)
    if config.engine == "local":
        warn_if_crowded(config.near, config.device_time_s)
    secret = _secret(config, secret_file)
    with open_engine(config) as engine:
        result = conduct(engine, config, secret=secret)
    if json:
        print_json(result)
    else:
        from rich.console import Console

        from paceline.view.terminal.table import summary

        Console(stderr=True).print(summary(result))
        print(f"{config.folder}")


def _secret(config: Any, file: Path | None) -> str:
    if config.listen is None and file is None:
        return ""
    from paceline.cli.secret import secret_for

    return secret_for(config.path, file)


def _path(file: Path | None) -> str | None:
    return None if file is None else str(file.resolve())


def _typed(context: typer.Context) -> set[str]:
    """The configuration fields that were given on the command line."""
    names = {"set_": "settings", "device_time": "device_time_s", "host_patience": "host_patience_s"}
    typed = (name for name in context.params if _was_typed(context, name))
    return {names.get(name, name) for name in typed}


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _as_before(run: Path, asked: dict[str, Any], typed: set[str]) -> dict[str, Any]:
    """A resumed run keeps its configuration, but for what was typed."""
    checkpoint = find_checkpoint(run)
    old = _config_of(run if (run / "config.json").is_file() else checkpoint.parent)
    kept = {field: getattr(old, field) for field in asked if field not in typed}
    return asked | kept | {"resume": str(checkpoint)}


def _config_of(run: Path) -> RunConfig:
    import msgspec

    from paceline.config import RunConfig
    from paceline.errors import TraceError

    try:
        return msgspec.json.decode((run / "config.json").read_bytes(), type=RunConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise TraceError(f"cannot read the configuration of {run}: {error}.") from None


def make_config(asked: dict[str, Any], runs: Path) -> Any:
    """A checked configuration in a new run folder."""
    import msgspec

    from paceline.config import RunConfig
    from paceline.errors import ConfigError
    from paceline.fabric.choice import check_hosts

    _check_words(asked)
    check_engine(asked)
    try:
        config = msgspec.convert(asked | {"run": "", "folder": ""}, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{str(error).rstrip('.')}.") from None
    check_hosts(config.fabric, config.near < config.workers)
    run, folder = new_run(runs, config.protocol or "script")
    return msgspec.structs.replace(config, run=run, folder=str(folder))


def _check_words(asked: dict[str, Any]) -> None:
    """Flags that take one of a few words."""
    from typing import Literal, get_args, get_origin, get_type_hints

    from paceline.config import RunConfig
    from paceline.errors import unknown

    for field, kind in get_type_hints(RunConfig).items():
        if get_origin(kind) is Literal and field in asked and asked[field] not in get_args(kind):
            raise unknown(f"--{field.replace('_', '-')}", str(asked[field]), get_args(kind))


def checked_protocol(
    name: str | None,
    settings: dict[str, Any],
    compress: str = "none",
    fabric: str = "shared",
    every: str | None = None,
    store_hosts: int = 1,
) -> None:
    """Find a misspelt protocol or setting, or what it cannot use, before anything is started."""
    from paceline.fabric.choice import check_fabric, check_store_hosts
    from paceline.protocols.rules.compression import check_family, parse_compression
    from paceline.protocols.rules.steady import check_steady
    from paceline.protocols.settings import make_any

    parse_compression(compress)
    if name is not None:
        protocol = make_any(name, settings)
        check_family(compress, name, protocol)
        check_fabric(fabric, name, protocol, compress)
        check_store_hosts(store_hosts, name, protocol)
        check_steady(every, name, protocol)


def find_checkpoint(run: Path) -> Path:
    """The checkpoint of a run folder, or the folder itself."""
    from paceline.errors import ConfigError
    from paceline.store.disk.folders import is_checkpoint, saved_in

    run = run.resolve()  # `latest` is about to point elsewhere
    folder = run if is_checkpoint(run) else saved_in(run) or _began_with(run)
    if folder is None:
        raise ConfigError(
            f"no checkpoint in {run}. Only a run that was stopped or failed leaves one, or one that was "
            "killed and had --checkpoint-every."
        )
    return folder


def _began_with(run: Path) -> Path | None:
    """The checkpoint that a run went on from, if it was killed before it took one of its own."""
    from paceline.store.disk.folders import is_checkpoint

    ended = (run / "weights.safetensors").exists() or not (run / "config.json").is_file()
    resumed = None if ended else _config_of(run).resume
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
