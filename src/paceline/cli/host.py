"""`paceline host`: this machine's workers for a run whose store is elsewhere."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import check_script, errors_for_people, heed_termination

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.engines.control import Ended
    from paceline.engines.local import LocalEngine
    from paceline.fabric.tls import Trust


def host(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the run listens.")],
    workers: Annotated[int, typer.Option("--workers", "-n", help="Worker processes to start here.")] = 1,
    secret_file: o.SecretFile = None,
    tls: o.GuestTls = None,
    tls_ca: o.TlsCa = None,
    script: Annotated[
        Path | None, typer.Option(help="The script, if its path here is another than at the run's host.")
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for the run, and for places in it.")
    ] = 60.0,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the other hosts reach this one, if the run's store lies on several (--store-hosts). "
            "Default: this machine's address on the way to the run, and a free port.",
        ),
    ] = "",
    runs: o.Runs = Path("runs"),
) -> None:
    """Take part in a run that another host started with --listen.

    The run tells which script to run, with which arguments and protocol; the same files have to be
    here. A link that is cut is waited for; Ctrl-C takes this host's workers out, and the run goes on
    (unless this host holds a portion of the store: then it ends).

    Example: paceline host 10.0.0.1:29600 --workers 2 --secret-file run.secret
    """
    with errors_for_people():
        _host(address, workers, secret_file, _trust(tls, tls_ca, address), script, runs, wait, listen)


def _trust(tls: bool | None, ca: Path | None, address: str) -> Trust | None:
    """What to believe of who answers; None: it need not encrypt, and must not."""
    from paceline.errors import ConfigError
    from paceline.fabric.choice import is_loopback
    from paceline.fabric.tls import Trust
    from paceline.fabric.wire import parse_address

    if tls is False:
        if ca is not None:
            raise ConfigError(
                f"--tls-ca {ca} says whose certificates to believe, but with --plain there are none. "
                "Leave one of them out."
            )
        return None
    either = tls is None and ca is None and is_loopback(parse_address(address)[0])
    return Trust(None if ca is None else str(ca.resolve()), or_plain=either)


def _host(
    address: str,
    workers: int,
    secret_file: Path | None,
    trust: Trust | None,
    script: Path | None,
    runs: Path,
    wait: float,
    listen: str,
) -> None:
    import msgspec

    from paceline.cli.running.secret import needed_secret
    from paceline.engines.hosting import enrol, give_back
    from paceline.engines.local import LocalEngine
    from paceline.errors import ConfigError, RunError

    if workers < 1:
        raise ConfigError(f"workers must be at least 1, got {workers}.")
    secret = needed_secret(secret_file).decode()
    print(f"calling {address}, for up to {wait:g} s", file=sys.stderr, flush=True)
    config, guest = enrol(address, secret, workers, runs, wait, trust, _once())
    path = Path(config.script or "") if script is None else script
    try:
        check_script(path)
        _check_protocol(config)
    except ConfigError:
        give_back(guest, secret, trust)
        raise
    config = msgspec.structs.replace(config, script=str(path))
    print(
        f"rank{'s' * (len(guest.ranks) > 1)} {', '.join(map(str, guest.ranks))} of {config.workers}; "
        f"logs in {config.folder}/logs",
        file=sys.stderr,
    )
    with LocalEngine(config.script) as engine:
        engine.launch(config, secret, msgspec.structs.replace(guest, listen=listen))
        ended = _wait(engine)
    if ended.store_status:
        raise RunError(
            f"{_last_word(config, ended)}. This host's workers were ended. Read {config.folder}/logs/."
        )
    if any(ended.statuses.values()):
        bad = ", ".join(f"{rank} ({code})" for rank, code in sorted(ended.statuses.items()) if code)
        raise RunError(f"ranks ended badly: {bad}. Read {config.folder}/logs/.")


def _last_word(config: RunConfig, ended: Ended) -> str:
    """Of the relay, the process between the run and this host's workers."""
    if ended.store_status < 0:
        return f"the relay of this host was ended by {signal.Signals(-ended.store_status).name}"
    log = config.path / "logs" / "relay.log"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return (
        lines[-1].rstrip(".") if lines else f"the relay of this host ended with status {ended.store_status}"
    )


def _once() -> Callable[[str], None]:
    """Says the first time that there is no place so far."""
    told: list[str] = []

    def put_off(why: str) -> None:
        if not told:
            told.append(why)
            print(f"no place so far: {why} Waiting for one to be free", file=sys.stderr, flush=True)

    return put_off


def _check_protocol(config: RunConfig) -> None:
    """A protocol of one's own has to be here as well, in the same file, before workers are started."""
    from paceline.protocols.own import check_same_file
    from paceline.protocols.settings import class_of

    if config.protocol is not None:
        class_of(config.protocol)
        check_same_file(config.protocol, config.protocol_sha256, "where the run was started")


def _wait(engine: LocalEngine) -> Ended:
    heed_termination()
    ended, stopping = None, False
    while ended is None:
        try:
            ended = engine.wait(1.0)
        except KeyboardInterrupt:
            if stopping:
                raise
            stopping = True
            engine.stop()
            with contextlib.suppress(OSError):  # of a terminal that was closed
                print("stopping this host's workers (again to end them at once)", file=sys.stderr)
    return ended
