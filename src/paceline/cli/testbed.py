"""`paceline testbed`: real hosts on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.flags import options as o
from paceline.cli.running.common import errors_for_people, print_json
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.testbed.bed import BedHost
    from paceline.testbed.status import Status

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Several real hosts on this one machine.\n\nThey are network namespaces with addresses, link "
    "speeds and CPU shares of their own. Needs root. Hosts reach one another by address and by name, and "
    "nothing else; they share files.",
)

HostName = Annotated[str, typer.Argument(metavar="HOST", help="A host of the testbed.")]
Name = Annotated[
    str | None, typer.Option("--name", help="Which testbed. Default: the one that `up` made, if only one.")
]


@app.command()
def up(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="TOML: [testbed] name, then [host.NAME] link_mbit, cpu, latency_ms."
        ),
    ],
    json: o.Json = False,
) -> None:
    """Make a testbed. It stays until `down`.

    Example: paceline testbed up examples/clusters/testbed.toml
    """
    with errors_for_people():
        from paceline.testbed import Testbed, load_spec
        from paceline.testbed.status import status_of

        made = status_of(Testbed.up(load_spec(file), keep=True).name)
        if json:
            print_json(made)
        else:
            _show([made])


@app.command(name="exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def exec_(
    host: HostName,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run there.")],
    name: Name = None,
    json: o.Json = False,
) -> None:
    """Run a command on a host, and end as it does: same output, same exit status.

    Options stand before HOST. With --json: exit status, standard output and standard error as one document.

    Example: paceline testbed exec a -- python -c "import socket; print(socket.gethostname())"
    """
    with errors_for_people():
        line = _host(name, host).command(command[1:] if command[0] == "--" else command)
        if not json:
            sys.stdout.flush()
            os.execvp(line[0], line)
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)
        print_json(
            {
                "host": host,
                "command": command,
                "exit": done.returncode,
                "out": done.stdout,
                "err": done.stderr,
            }
        )
        raise typer.Exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


@app.command()
def cut(host: HostName, name: Name = None, json: o.Json = False) -> None:
    """Cut a host's link: packets vanish, connections see silence, as with a pulled cable."""
    with errors_for_people():
        _host(name, host).cut()
        _tell({"host": host, "cut": True}, f"{host} is cut off", json)


@app.command()
def heal(host: HostName, name: Name = None, json: o.Json = False) -> None:
    """Heal a link that was cut: connections go on where they were."""
    with errors_for_people():
        _host(name, host).heal()
        _tell({"host": host, "cut": False}, f"{host} is joined again", json)


@app.command()
def kill(host: HostName, name: Name = None, json: o.Json = False) -> None:
    """Kill all processes of a host. The host stays, and can run others.

    Others learn of it, since the kernel closes the connections; cut it first to take its power away.
    """
    with errors_for_people():
        pids = _host(name, host).kill()
        _tell(
            {"host": host, "killed": pids},
            f"{host}: killed {len(pids)} process{'es' * (len(pids) != 1)}",
            json,
        )


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="One testbed. Default: all of them.")] = None,
    json: o.Json = False,
) -> None:
    """Show testbeds, their hosts, what is cut and what runs there."""
    with errors_for_people():
        from paceline.testbed import records
        from paceline.testbed.status import status_of
        from paceline.testbed.system import need_privileges

        need_privileges()
        found = [status_of(each) for each in ([records.the_one(name)] if name else records.names())]
        if json:
            print_json(found)
        elif found:
            _show(found)
        else:
            print("no testbed is up")


@app.command()
def down(
    name: Annotated[
        str | None, typer.Argument(help="Which testbed. Default: the one that `up` made, if only one.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All testbeds, those of other processes included.")
    ] = False,
    stale: Annotated[
        bool, typer.Option("--stale", help="Only testbeds whose owner was killed before it could clean up.")
    ] = False,
    json: o.Json = False,
) -> None:
    """Take a testbed down: kill its processes, remove its hosts, leave nothing behind."""
    with errors_for_people():
        removed = _removed(name, everything, stale)
        _tell({"removed": removed}, f"removed: {', '.join(removed) or 'nothing was there'}", json)


def _removed(name: str | None, everything: bool, stale: bool) -> list[str]:
    from paceline.testbed import records
    from paceline.testbed.bed import take_down, take_down_stale
    from paceline.testbed.system import need_privileges

    need_privileges()
    if (name is not None) + everything + stale > 1:
        raise ConfigError("NAME, --all and --stale each say what to take down. Give one of them.")
    if stale:
        return take_down_stale()
    names = records.names() if everything else [records.the_one(name)]
    for each in names:
        take_down(each)
    return names


def _host(name: str | None, host: str) -> BedHost:
    from paceline.testbed import Testbed

    return Testbed.find(name)[host]


def _tell(facts: dict[str, Any], sentence: str, json: bool) -> None:
    if json:
        print_json(facts)
    else:
        print(sentence)


def _show(found: list[Status]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for each in found:
        owner = f" by process {each.owner}" if each.owner is not None else ""
        console.print(f"[bold]{each.testbed}[/] ({each.state}{owner})")
        if each.hosts:
            console.print(_table(each))


def _table(found: Status) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("host", "address", "link", "cpu", "latency", "state", "processes"):
        table.add_column(heading, no_wrap=True)
    for host in found.hosts:
        table.add_row(
            host.host,
            host.address,
            _measure(host.link_mbit, "Mbit/s"),
            _measure(host.cpu, "cores"),
            _measure(host.latency_ms, "ms"),
            "cut" if host.cut else "joined",
            str(len(host.processes)),
        )
    return table


def _measure(value: float | None, unit: str) -> str:
    return "—" if value is None else f"{value:g} {unit}"
