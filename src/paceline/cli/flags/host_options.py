"""The flags of runs on several hosts, each written once; and what a flag is to a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from paceline.engines import ENGINES


class Dial(NamedTuple):
    """What a flag is to a run's configuration (see dials.py)."""

    default: Any
    """Unless a command has another one; the same as the configuration's own, which a test looks after."""
    field: str | None = ""
    """The configuration's field, if its name is another than the flag's; None: it is not in there."""
    parse: Callable[[Any], Any] | None = None
    """Makes what was typed into what the configuration has."""


def _path(file: Path | None) -> str | None:
    return None if file is None else str(file.resolve())


def _is_true(given: bool | None) -> bool:
    return given is True


TRAINING = "What to train"
PROTOCOL = "Protocol"
NUMBERS = "Gradients and steps"
WORKERS = "Workers"
HOSTS = "Several hosts"
FAULTS = "Faults"
RECORD = "Records"
EMULATION = "Emulated devices"
GROUPS = (TRAINING, PROTOCOL, NUMBERS, WORKERS, HOSTS, FAULTS, RECORD, EMULATION)
"""The groups in which `--help-all` shows the flags, in this order."""
*_others, _last = (offer.help for offer in ENGINES.values())
Engine = Annotated[
    str,
    typer.Option(
        metavar="|".join(ENGINES),
        help=f"Who starts the workers: {'; '.join(_others)}; or {_last}.",
        rich_help_panel=WORKERS,
    ),
    Dial("local"),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto",
        help=(
            "Address of the Ray cluster to use; run this command on one of its nodes. Default: "
            "RAY_ADDRESS, or else a cluster that the run starts for itself."
        ),
        rich_help_panel=WORKERS,
    ),
    Dial(None),
]
Master = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="With --engine spark: the Spark master, for instance spark://host:7077. Default: local[*].",
        rich_help_panel=WORKERS,
    ),
    Dial(None),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Let workers of other hosts join at this address of this machine (`paceline host`).",
        rich_help_panel=HOSTS,
    ),
    Dial(None),
]
Here = Annotated[
    int | None,
    typer.Option(
        help="How many of the workers to start on this machine. Default: all.", rich_help_panel=HOSTS
    ),
    Dial(None),
]
StoreHosts = Annotated[
    int,
    typer.Option(
        help=(
            "Number of hosts that hold the store, this one included. Each holds a portion of the weights "
            "and of the optimizer's state, so the traffic is shared among their links. If one of them is "
            "lost, the run ends."
        ),
        rich_help_panel=HOSTS,
    ),
    Dial(1),
]
HostPatience = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help=(
            "How long another host may be unreachable (silent, or with a broken connection) before its "
            "workers count as lost. A host that closes its connection properly has 3 s to come back. The "
            "run does not wait for a host whose relay has died."
        ),
        rich_help_panel=HOSTS,
    ),
    Dial(30.0, "host_patience_s"),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        help=(
            "File with the run's secret. The environment variable PACELINE_SECRET works too. Without "
            "either, a run that listens creates a secret in its folder."
        ),
        rich_help_panel=HOSTS,
    ),
    Dial(None, field=None),
]
Tls = Annotated[
    bool | None,
    typer.Option(
        "--tls/--plain",
        help=(
            "Encrypt the traffic between hosts (TLS 1.3, with a certificate made for the run), or not. "
            "Default: encrypt, unless the run listens on the loopback interface only. `paceline bench "
            "network` measures the cost."
        ),
        rich_help_panel=HOSTS,
    ),
    Dial(None, parse=_is_true),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(help="File with your own certificate (and its chain), for --tls.", rich_help_panel=HOSTS),
    Dial(None, parse=_path),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(help="File with the key of your certificate.", rich_help_panel=HOSTS),
    Dial(None, parse=_path),
]
GuestTls = Annotated[
    bool | None,
    typer.Option(
        "--tls/--plain",
        help=(
            "--tls: refuse unencrypted connections. --plain: connect unencrypted, to a run that was "
            "started with --plain. Default: encrypted; over loopback, the same as the run."
        ),
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        help=(
            "File with the CA that signed the certificate given to the run. That certificate must be "
            "issued for the address you connect to. Without this file only the secret proves that the "
            "certificate is the run's."
        ),
    ),
]
