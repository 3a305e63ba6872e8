"""`paceline doctor`: is this host fit for a run, and is the way to another one."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import errors_for_people, print_json
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.doctor.findings import Finding
    from paceline.doctor.link import MeasuredLink

BETWEEN = "Between two hosts"
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    address: Annotated[
        str | None,
        typer.Argument(metavar="ADDRESS", help="With --serve: where to listen. Default: 127.0.0.1."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="Another host: does its name resolve, does it answer? Repeatable."
        ),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve", help="Answer a doctor on another host until Ctrl-C.", rich_help_panel=BETWEEN
        ),
    ] = False,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Measure speed, round trip and clock to a doctor that serves there.",
            rich_help_panel=BETWEEN,
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the secret both sides know. Default: the variable PACELINE_SECRET.",
            rich_help_panel=BETWEEN,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="A certificate of your own for --tls: is it readable, in date, and for which hosts?"
        ),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="File with the key of that certificate.")] = None,
    seconds: Annotated[
        float, typer.Option(min=0.05, max=60, help="Time for each measure.", rich_help_panel=BETWEEN)
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="With --serve: end after one measurement.", rich_help_panel=BETWEEN)
    ] = False,
    json: o.Json = False,
) -> None:
    """Check this machine and the way to other hosts.

    Every finding says what to do about it.

    Exit status 1 when something is a problem.

    Between two hosts that know the same secret: paceline doctor --serve 10.0.0.5 on the one that has this
    address, paceline doctor --to 10.0.0.5 on the other.
    """
    with errors_for_people():
        certificate = _certificate(tls_cert, tls_key)
        _check_request(address, bool(host or certificate), serve, to, once)
        if serve:
            _serve(address or "127.0.0.1", secret_file, once, json)
        elif to is not None:
            _measure(to, secret_file, seconds, json)
        else:
            _examine(host or [], certificate, json)


def _certificate(file: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    if file is None and key is None:
        return None
    if file is None or key is None:
        raise ConfigError("a certificate of your own takes --tls-cert and --tls-key, and one is missing.")
    return file, key


def _check_request(address: str | None, examines: bool, serve: bool, to: str | None, once: bool) -> None:
    if serve + (to is not None) + examines > 1:
        raise ConfigError(
            "--serve, --to, and a look at this machine (--host, --tls-cert) are different errands. Give one."
        )
    if address is not None and not serve:
        raise ConfigError(f"what of {address}? Write --to, --host or --serve before it.")
    if once and not serve:
        raise ConfigError("--once says when --serve ends. Add --serve, or leave it out.")


def _examine(hosts: list[str], certificate: tuple[Path, Path] | None, json: bool) -> None:
    from paceline.doctor.installed import check_installed
    from paceline.doctor.machine import check_machine
    from paceline.doctor.reach import check_host
    from paceline.doctor.tls import check_certificate, check_tls

    asked = [check_host(each) for each in hosts]
    asked += [check_certificate(*certificate)] if certificate is not None else []
    _answer([*check_installed(), check_tls(), *check_machine(), *asked], None, json)


def _measure(to: str, secret_file: Path | None, seconds: float, json: bool) -> None:
    from paceline.cli.running.secret import needed_secret
    from paceline.doctor.link import judge, measure

    link = measure(to, needed_secret(secret_file), seconds)
    _answer(judge(link), link, json)


def _serve(address: str, secret_file: Path | None, once: bool, json: bool) -> None:
    from paceline.cli.running.secret import needed_secret
    from paceline.doctor.server import LinkServer

    server = LinkServer(address, needed_secret(secret_file), _say)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _say(f"serving at {address}, port {server.port}; Ctrl-C ends it")
    try:
        server.serve(once)
    except KeyboardInterrupt:
        _say(f"served {server.served}")
    if json:
        print_json({"address": address, "port": server.port, "served": server.served})


def _answer(findings: list[Finding], link: MeasuredLink | None, json: bool) -> None:
    from paceline.doctor.findings import worst

    state = worst(findings)
    if json:
        print_json({"state": state, "findings": findings, "link": link})
    else:
        _show(findings)
    if state == "problem":
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("check", "", "seen"):
        table.add_column(heading, overflow="fold")
    table.add_column("what to do", ratio=1)
    for finding in findings:
        state = Text(finding.state, style=STYLES[finding.state])
        table.add_row(Text(finding.check), state, Text(finding.seen), Text(finding.advice))
    Console(highlight=False).print(table)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
