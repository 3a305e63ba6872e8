"""The local engine: workers are processes of this machine, forked from a warm zygote."""

from __future__ import annotations

import ast
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from paceline.config import RunConfig
from paceline.engines import control as c
from paceline.errors import EngineLost
from paceline.fabric.channel import Channel


class LocalEngine:
    """Starts runs one after another; the first pays for importing torch, the others do not."""

    def __init__(self, script: str | None = None) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            sys.executable,
            "-P",  # a script named like one of Python's own modules is not to be taken for it
            "-m",
            "paceline.engines.zygote",
            str(os.getpid()),
            str(theirs.fileno()),
            *_heavy_imports(script),
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        theirs.close()
        self._channel = Channel(mine)
        self.pids: tuple[int, ...] = ()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def launch(self, config: RunConfig, secret: str = "", guest: c.Guest | None = None) -> None:
        """Start a run, or this host's part of one; it goes on by itself."""
        self._channel.send(c.Launch(config, secret, guest))
        started = self._receive()
        assert isinstance(started, c.Started)
        self.pids = started.pids

    def wait(self, timeout_s: float) -> c.Ended | None:
        """The end of the run, if it comes within this time."""
        ready, _, _ = select.select([self._channel], [], [], timeout_s)
        if not ready:
            return None
        ended = self._receive()
        assert isinstance(ended, c.Ended)
        return ended

    def stop(self) -> None:
        """Ask the run to end and to save its state."""
        self._channel.send(c.Stop())

    def close(self) -> None:
        """End everything that is left."""
        with contextlib.suppress(OSError):
            self._channel.send(c.Quit())
        self._channel.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _how_it_ended(self) -> str:
        """It has hung up. With a status of its own it has printed a traceback; a signal prints nothing."""
        status = self._process.wait()
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}."
        return f"ended unexpectedly with status {status}. Its message is above."

    def _receive(self) -> c.FromZygote:
        received = self._channel.receive(c.launcher_decoder)
        if received is None:
            raise EngineLost(f"the process that starts workers {self._how_it_ended()}")
        return received[0]


def check(where: str | None) -> None:
    """Nothing is missing on this machine."""


def opened(script: str | None, where: str | None) -> LocalEngine:
    """The engine, until the runs are over."""
    return LocalEngine(script)


def _heavy_imports(script: str | None) -> list[str]:
    """Modules the script imports, for the zygote to choose from."""
    if script is None:
        return []
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return sorted(names)
