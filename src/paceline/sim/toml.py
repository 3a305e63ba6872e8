"""Cluster files: TOML in, a checked `Cluster` out, and one clear sentence when something is wrong.

    workers = 8
    batch = 32                     # samples behind one push
    model_bytes = 100e6
    apply_s = 0.002                # the store's time per push

    [compute]
    kind = "lognormal"             # fixed, normal, lognormal, halfnormal, exponential, pareto, recorded
    mean_s = 0.1
    spread = 0.1

    [link]
    latency_s = 0.0005
    bandwidth_bytes_per_s = 1.25e9
    [links.3]                      # rank 3 has its own
    bandwidth_bytes_per_s = 1.25e8

    [slow]
    3 = 2.5                        # rank 3 always computes 2.5 times slower

    [transient]
    factor = 2.0
    mean_length_s = 5.0
    mean_gap_s = 20.0

    [drift]                        # a trend: in the end half as fast, after ten minutes
    factor = 2.0
    over_s = 600.0

    [stall]                        # ranks 1, 2, ... in turn stand still
    every_s = 8.0
    length_s = 2.0

    [[event]]
    at_s = 30.0
    kill = 5

Links are every worker's own way to the store. Machines that share theirs are written instead:

    [[host]]                       # in the order of ranks; the first has the store, or the meeting place
    workers = 2                    # 1, if it is left out
    bandwidth_bytes_per_s = 1.25e8
    latency_s = 0.0001
    rack = "left"
    [racks.left]                   # its uplink
    bandwidth_bytes_per_s = 1.25e7

with `fabric = "ring"` if peers' vectors go around and not through the first host, and `store_hosts = 2` if
two hosts hold a portion of the store each.

Instead of `workers`, unlike machines are written as groups: `[[group]] count = 4, slow = 2.0` with
their own `compute`, `transient`, `drift` and `link` where these differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from paceline.decoding import decode_toml
from paceline.errors import ConfigError, TraceError, Undecodable, unknown
from paceline.sim.cluster import Cluster, Drift, Group, Membership, Stall, Transient
from paceline.sim.compute import KINDS, ComputeTime, Recorded
from paceline.sim.network.links import Host, Link

S = TypeVar("S", bound=msgspec.Struct)
Table = dict[str, Any]


def load_cluster(path: Path | str) -> Cluster:
    """Read a cluster file."""
    path = Path(path)
    try:
        table = decode_toml(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the cluster file {path}: {error.strerror}. Check the path.") from None
    except Undecodable as error:
        raise ConfigError(f"the cluster file {path} is not TOML: {error}. Fix that line.") from None
    try:
        return _Reader(path.parent).cluster(table)
    except ConfigError as error:
        raise ConfigError(f"cluster file {path}: {error}") from None


class _Reader:
    """Turns tables into structs. Runs named by a file are looked for beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: dict[str, Callable[[Any], Any]] = {
            "compute": self._compute,
            "link": lambda value: self._struct(Link, value, "[link]"),
            "transient": lambda value: self._struct(Transient, value, "[transient]"),
            "drift": lambda value: self._struct(Drift, value, "[drift]"),
            "stall": lambda value: self._struct(Stall, value, "[stall]"),
            "links": self._links,
            "slow": self._slow,
            "group": lambda value: self._list(Group, value, "[[group]]"),
            "event": lambda value: self._list(Membership, value, "[[event]]"),
            "host": lambda value: self._list(Host, value, "[[host]]"),
            "racks": self._racks,
        }

    def cluster(self, table: Table) -> Cluster:
        """The whole file."""
        for name, count, usual in (("group", "count", None), ("host", "workers", 1)):
            parts = table.get(name)
            if "workers" not in table and isinstance(parts, list):
                counts = [part.get(count, usual) for part in parts if isinstance(part, dict)]
                table = {"workers": sum(n for n in counts if isinstance(n, int)), **table}
        return self._struct(Cluster, table, "the file")

    def _struct(self, cls: type[S], table: Any, where: str) -> S:
        types = get_type_hints(cls)
        _check_table(table, where, {field.name for field in msgspec.structs.fields(cls)})
        for field in msgspec.structs.fields(cls):
            if field.required and field.name not in table:
                raise ConfigError(f"{where} has no {field.name}, got {table!r}. Add {field.name} = ...")
        # Built by its constructor: a struct that refuses a value then does so in its own words.
        return cls(**{key: self._value(cls, key, value, types, where) for key, value in table.items()})

    def _value(self, cls: type, key: str, value: Any, types: Table, where: str) -> Any:
        if key in self._parts and not (cls is Group and key == "slow"):
            return self._parts[key](value)
        return _convert(value, types[key], f"{key} in {where}")

    def _compute(self, value: Any) -> ComputeTime:
        where = "[compute]"
        if not isinstance(value, dict) or "kind" not in value:
            raise ConfigError(f"{where} needs a kind, got {value!r}. Available: {', '.join(KINDS)}.")
        kind = str(value["kind"])
        if kind not in KINDS:
            raise unknown("kind of compute", kind, KINDS)
        rest = {key: item for key, item in value.items() if key != "kind"}
        where = f"[compute] of kind {kind!r}"
        return self._recorded(rest, where) if kind == "recorded" else self._struct(KINDS[kind], rest, where)

    def _recorded(self, table: Table, where: str) -> Recorded:
        _check_table(table, where, {"run"})
        run = table.get("run")
        if not isinstance(run, str):
            raise ConfigError(f"{where} needs the run it was recorded in, got {run!r}. Add run = 'runs/...'.")
        try:
            return Recorded.from_trace(self._folder / run)
        except TraceError as error:
            raise ConfigError(f"{where}: {error}") from None

    def _slow(self, value: Any) -> dict[int, float]:
        _check_table(value, "[slow]")
        return {_rank(key, "[slow]"): _convert(x, float, f"{key} in [slow]") for key, x in value.items()}

    def _links(self, value: Any) -> dict[int, Link]:
        _check_table(value, "[links]")
        return {_rank(key, "[links]"): self._struct(Link, x, f"[links.{key}]") for key, x in value.items()}

    def _racks(self, value: Any) -> dict[str, Link]:
        _check_table(value, "[racks]")
        return {name: self._struct(Link, x, f"[racks.{name}]") for name, x in value.items()}

    def _list(self, cls: type[S], value: Any, where: str) -> tuple[S, ...]:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list of tables, got {value!r}. Use double brackets.")
        return tuple(self._struct(cls, item, where) for item in value)


def _check_table(table: Any, where: str, known: set[str] | None = None) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table of keys and values, got {table!r}. Write key = value.")
    strangers = [key for key in table if known is not None and key not in known]
    if strangers:
        raise unknown(f"key in {where}:", strangers[0], known or ())


def _rank(key: str, where: str) -> int:
    if not key.isdecimal():
        raise ConfigError(f"{where} is keyed by rank, got {key!r}. Write 3 = ..., say.")
    return int(key)


def _convert(value: Any, kind: Any, what: str) -> Any:
    if isinstance(value, float) and value.is_integer() and kind is not float:
        value = int(value)  # 100e6 is how people write a size
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what} has a wrong value: {error}, got {value!r}. Fix it.") from None
