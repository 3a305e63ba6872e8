"""The description of a testbed: TOML in, a checked `Spec` out.

[testbed]
name = "lab"            # default: the file's own name

[host.a]
link_mbit = 1000

[host.b]
link_mbit = 100
cpu = 0.5
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

from paceline.decoding import decode_toml
from paceline.errors import ConfigError, Undecodable, unknown

MAX_HOSTS = 250
"""Addresses of one /24 network, and some to spare."""

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_MAX_BED_NAME = 40
_MAX_HOST_NAME = 12
"""The kernel allows 15 characters for the name of a link, and ours begins with `to-`."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One host."""

    link_mbit: float | None = None
    """Speed of its link in Mbit/s, each way. Default: as fast as the machine can."""

    cpu: float | None = None
    """Cores its processes get together, for instance 0.5. Default: whatever is free."""

    latency_ms: float | None = None
    """Delay its link adds, each way. Needs a kernel with netem."""

    def __post_init__(self) -> None:
        _check_range("link_mbit", self.link_mbit, 0.1, 100_000)
        _check_range("cpu", self.cpu, 0.05, 1024)
        _check_range("latency_ms", self.latency_ms, 0.01, 10_000)


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole testbed."""

    hosts: dict[str, HostSpec]
    """By name. The first has address 10.77.0.1, the second 10.77.0.2, and so on."""

    name: str = field(default="testbed")
    """Tells testbeds of one machine apart."""

    def __post_init__(self) -> None:
        check_bed_name(self.name)
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise ConfigError(f"a testbed has 1 to {MAX_HOSTS} hosts, got {len(self.hosts)}. Add [host.a].")
        for host in self.hosts:
            _check_name("host", host, _MAX_HOST_NAME)


def check_bed_name(name: str) -> None:
    """Refuse what could not be a testbed's, before anything by that name is made or removed."""
    _check_name("testbed", name, _MAX_BED_NAME)


def load_spec(path: Path | str) -> Spec:
    """Read a testbed file."""
    path = Path(path)
    try:
        table = decode_toml(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the testbed file {path}: {error.strerror}. Check the path.") from None
    except Undecodable as error:
        raise ConfigError(f"the testbed file {path} is not TOML: {error}. Fix that line.") from None
    try:
        return _spec(table, path.stem)
    except ConfigError as error:
        raise ConfigError(f"testbed file {path}: {error}") from None


def _spec(table: dict[str, Any], stem: str) -> Spec:
    _check_table(table, "the file", {"testbed", "host"})
    about = table.get("testbed", {})
    _check_table(about, "[testbed]", {"name"})
    hosts = table.get("host", {})
    _check_table(hosts, "[host]")
    name = about.get("name", stem)
    if not isinstance(name, str):
        raise ConfigError(f'name in [testbed] must be a text, got {name!r}. Write name = "lab", say.')
    return Spec({host: _host(host, keys) for host, keys in hosts.items()}, name)


def _host(name: str, table: Any) -> HostSpec:
    where = f"[host.{name}]"
    _check_table(table, where, {item.name for item in fields(HostSpec)})
    try:
        return HostSpec(**table)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_table(table: Any, where: str, known: set[str] | None = None) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table of keys and values, got {table!r}. Write key = value.")
    strangers = [key for key in table if known is not None and key not in known]
    if strangers:
        raise unknown(f"key in {where}:", strangers[0], known or ())


def _check_range(key: str, value: Any, least: float, most: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ConfigError(f"{key} must be a number, got {value!r}. Write {key} = {max(least, 1):g}, say.")
    if not least <= value <= most:
        raise ConfigError(f"{key} must be from {least:g} to {most:g}, got {value:g}. Fix it.")


def _check_name(kind: str, name: str, longest: int) -> None:
    if not _NAME.fullmatch(name) or len(name) > longest:
        raise ConfigError(
            f"a {kind} is named with up to {longest} lower-case letters, digits and dashes, "
            f"beginning with a letter, got {name!r}. Choose such a name."
        )
