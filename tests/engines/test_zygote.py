"""The process that forks workers, when its launcher goes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import RunConfig
from paceline.engines import control
from paceline.fabric.channel import Channel


@pytest.mark.timeout(60)
def test_a_launcher_that_hangs_up_while_workers_start_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    config = RunConfig(run="r", folder=str(tmp_path), script=str(tmp_path / "none.py"))
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = Channel(mine)
    launcher.send(control.Launch(config))  # heard once torch is imported; by then nobody listens
    launcher.close()
    command = [sys.executable, "-m", "paceline.engines.zygote", str(os.getpid()), str(theirs.fileno())]
    done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, check=False)
    theirs.close()
    assert (done.returncode, done.stderr) == (0, "")
