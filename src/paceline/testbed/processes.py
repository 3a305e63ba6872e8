"""Processes of a host: who belongs to it, starting one there, ending all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import RunError
from paceline.testbed.network import NAMESPACES

_ENTER = """
[ -z "$1" ] || echo $$ > "$1" || exit 125
namespace=$2 name=$3 hosts=$4; shift 4
exec ip netns exec "$namespace" unshare --uts sh -c '
    echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts || exit 125
    shift 2
    exec "$@"
' sh "$name" "$hosts" "$@"
"""
"""Every step replaces the one before, so the process that was started is the command itself in the end.
The control group comes first, for `ip netns exec` hides its file system."""


def entering(namespace: str, name: str, hosts: Path, group: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command on a host."""
    return ["sh", "-c", _ENTER, "sh", group, namespace, name, str(hosts), *command]


def members(namespace: str) -> list[int]:
    """Processes that live in a network namespace."""
    try:
        there = (NAMESPACES / namespace).stat()
    except FileNotFoundError:
        return []
    return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _lives(pid, there)]


def _lives(pid: int, there: os.stat_result) -> bool:
    with contextlib.suppress(OSError):  # ended in the meantime, or about to: zombies live nowhere
        here = os.stat(f"/proc/{pid}/ns/net")
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
    return False


def kill_members(namespace: str, within_s: float = 10.0) -> list[int]:
    """Kill all processes of a namespace, again and again until they fork no more; return their ids."""
    killed: set[int] = set()
    deadline = time.monotonic() + within_s
    while left := members(namespace):
        if time.monotonic() > deadline:
            raise RunError(f"processes {left} of {namespace} live on {within_s:g} s after SIGKILL.")
        killed.update(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return sorted(killed)
