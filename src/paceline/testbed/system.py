"""The programs and privileges a testbed needs, and how its programs are called."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import ConfigError, RunError

PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "mount"}
"""What is called, and the package that brings it."""

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def why_not() -> str | None:
    """Why no testbed can be made here, in one sentence; None when one can."""
    if os.geteuid() != 0:
        return "a testbed makes network namespaces, which only root may. Run it as root, with sudo say."
    missing = [name for name, bit in _CAPABILITIES.items() if not _effective() >> bit & 1]
    if missing:
        return (
            f"a testbed makes network namespaces, and this process lacks {' and '.join(missing)}. "
            "In a container, start it privileged."
        )
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"a testbed needs the program {program!r}, which is not here. Install {package}."
    return None


def need_privileges() -> None:
    """Refuse early and clearly."""
    reason = why_not()
    if reason is not None:
        raise ConfigError(reason)


def _effective() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def call(*command: str, lines: Iterable[str] | None = None) -> str:
    """Run a program to its end, `lines` being its standard input; what it says if it fails is the error."""
    done = subprocess.run(
        command,
        input=None if lines is None else "\n".join(lines) + "\n",
        stdin=subprocess.DEVNULL if lines is None else None,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        said = "; ".join(line for line in (done.stderr or done.stdout).splitlines() if line)
        raise RunError(f"`{' '.join(command)}` failed: {said or f'exit status {done.returncode}'}.")
    return done.stdout
