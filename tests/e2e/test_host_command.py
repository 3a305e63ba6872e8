"""`paceline host`: how it ends when the run does otherwise than well."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.command import error_lines, start_command
from support.hosts import SECRET, listening
from support.runs import Lab, wait_until
from support.stops import stop_arrived

SIZES = ("momentum", "--samples", 240)
DIALS = {"workers": 2, "protocol": "bsp"}


def relay_among(processes: set[int]) -> int:
    """The relay of a host: of these it is the one that started the process which tells of its death."""
    started = max(processes)
    return int(Path(f"/proc/{started}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("store killed", "the run is lost: nothing listens at {address} any more (its connection "),
        ("run stopped", "the run was stopped where its store is: interrupted. "),
        ("relay killed", "the relay of this host was ended by SIGKILL. "),
    ],
)
def test_a_host_whose_run_is_gone_fails_at_once_with_a_sentence(
    lab: Lab, tmp_path: Path, what: str, told: str
) -> None:
    running, (name, port) = listening(lab, "train.py", *SIZES, *lab.pause(5), here=1, **DIALS)
    address = f"{name}:{port}"
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    before = lab.leftovers()
    command = start_command("host", address, "--secret-file", tmp_path / "secret", cwd=tmp_path)
    lab.until_paused(2)
    if what == "store killed":
        os.kill(running.store_pid, signal.SIGKILL)
    elif what == "relay killed":
        os.kill(relay_among(lab.leftovers() - before), signal.SIGKILL)
    else:
        running.engine.stop()
        wait_until(lambda: stop_arrived(running.engine._process.pid), "the stop has been passed on")
    lab.go_on()
    _, errors = command.communicate(timeout=40)  # a cut link would be waited for longer
    assert command.returncode == 1
    [line] = error_lines(errors)
    assert line.startswith(f"error: {told.format(address=address)}")
    assert "This host's workers were ended. Read runs/" in line
    lab.finish(running)
    wait_until(lambda: lab.leftovers() <= lab.idle, "everything is gone", 20)
