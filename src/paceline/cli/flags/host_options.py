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
        help="The Ray to use, from one of its nodes. Default: RAY_ADDRESS, else one of the run's own.",
        rich_help_panel=WORKERS,
    ),
    Dial(None),
]
Master = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="With --engine spark: Spark's master, for instance spark://host:7077. Default: local[*].",
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
        help="How many hosts hold the store, this one included: each has a portion of the weights and of the "
        "optimizer's state, so that their links share the traffic. Losing one of them ends the run.",
        rich_help_panel=HOSTS,
    ),
    Dial(1),
]
HostPatience = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="How long another host may be out of reach, be it silent or its connection reset, before its "
        "workers count as lost. One that closes its connection in good order has 3 s to come back; one whose "
        "relay has died is not waited for.",
        rich_help_panel=HOSTS,
    ),
    Dial(30.0, "host_patience_s"),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the run's secret; PACELINE_SECRET in the environment does as well. Without either a "
        "run that listens makes one, in its folder.",
        rich_help_panel=HOSTS,
    ),
    Dial(None, field=None),
]
Tls = Annotated[
    bool | None,
    typer.Option(
        "--tls/--plain",
        help="Encrypt what travels between hosts (TLS 1.3, with a certificate made for the run), or do not. "
        "Default: encrypted, unless the run listens on this machine's loopback only. `paceline bench "
        "network` tells what it costs.",
        rich_help_panel=HOSTS,
    ),
    Dial(None, parse=_is_true),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        help="File with a certificate of your own (and its chain), for --tls.", rich_help_panel=HOSTS
    ),
    Dial(None, parse=_path),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(help="File with the key of that certificate.", rich_help_panel=HOSTS),
    Dial(None, parse=_path),
]
GuestTls = Annotated[
    bool | None,
    typer.Option(
        "--tls/--plain",
        help="Talk to nobody who does not encrypt; or, to a run that was started with --plain, unencrypted. "
        "Default: encrypted, but over loopback as the run does.",
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        help="File with the CA that signed the run's own certificate, which has to be made out to the "
        "address given. Without it the secret alone proves whose certificate it is.",
    ),
]
