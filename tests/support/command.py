"""The `paceline` command as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = Path(sys.executable).with_name("paceline")


def start_command(*args: object, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Start it; its runs go to a folder below `cwd`."""
    return subprocess.Popen(
        [str(COMMAND), *map(str, args)],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_command(
    *args: object, cwd: Path, timeout_s: float = 100.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    command = start_command(*args, cwd=cwd, **environment)
    try:
        out, errors = command.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        command.kill()
        raise
    return subprocess.CompletedProcess(args, command.returncode, out, errors)


def error_lines(errors: str) -> list[str]:
    """The lines that tell of an error."""
    return [line for line in errors.splitlines() if line.startswith("error:")]
