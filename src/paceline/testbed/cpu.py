"""CPU shares: one control group per host with a quota, of version 1 or 2, whichever rules the CPU here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, RunError

_PERIOD_US = 20_000
"""Short, so that half a core is a slow core rather than a fast one with long pauses."""


@dataclass(frozen=True, slots=True)
class Controller:
    """Where control groups of the CPU are made."""

    root: Path
    version: int


def find_controller(mounts: Path = Path("/proc/self/mounts")) -> Controller | None:
    """The mounted CPU controller; version 1 first, because then version 2 does not have it."""
    tables = [line.split() for line in mounts.read_text().splitlines()]
    for _, place, kind, settings, *_ in tables:
        if kind == "cgroup" and "cpu" in settings.split(","):
            return Controller(Path(place), 1)
    for _, place, kind, *_ in tables:
        if kind == "cgroup2" and "cpu" in _read(Path(place) / "cgroup.controllers").split():
            return Controller(Path(place), 2)
    return None


def group_of(bed: str) -> str:
    """The parent of its hosts' groups."""
    return f"paceline.{bed}"


def limit(bed: str, host: str, cores: float, controller: Controller | None) -> Path:
    """Make a host's group; a process joins it by writing its id into the file that is returned."""
    if controller is None:
        raise ConfigError(
            f"host {host!r} asks for cpu = {cores:g}, and no control group for the CPU is mounted here. "
            "Leave cpu out, or mount one."
        )
    group = controller.root / group_of(bed) / host
    try:
        group.mkdir(parents=True)
        _write_quota(controller, group, cores)
    except OSError as error:
        raise ConfigError(
            f"host {host!r} asks for cpu = {cores:g}, and the control group {group} cannot be written: "
            f"{error.strerror}. Leave cpu out, or run where control groups are writable."
        ) from None
    return group / "cgroup.procs"


def _write_quota(controller: Controller, group: Path, cores: float) -> None:
    quota_us = round(cores * _PERIOD_US)
    if controller.version == 1:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        return
    for parent in (controller.root, group.parent):
        (parent / "cgroup.subtree_control").write_text("+cpu")
    (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")


def remove_groups(bed: str, controller: Controller | None, within_s: float = 5.0) -> None:
    """Delete a testbed's groups; the kernel may need a moment to see that their processes are gone."""
    top = None if controller is None else controller.root / group_of(bed)
    if top is None or not top.is_dir():
        return
    deadline = time.monotonic() + within_s
    for group in [*(path for path in top.iterdir() if path.is_dir()), top]:
        while not _removed(group):
            if time.monotonic() > deadline:
                raise RunError(f"the control group {group} is still in use after {within_s:g} s.")
            time.sleep(0.01)


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
