"""Signals to every process of a run, to the command alone, and a command that is killed: the run is saved."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.trace import Result, read_trace, tally
from paceline.trace.events import Decided
from paceline.view.report.record import read_record
from support.command import COMMAND, error_lines, start_command
from support.runs import SCRIPTS, Lab, Run, Running, children, once, wait_until
from support.stops import stop_arrived, stop_is_called

Write = Callable[[str], Path]
SAMPLES, EPOCHS = 48, 6
SIZES = ("momentum", "--samples", SAMPLES, "--epochs", EPOCHS)
ENDLESS = ("momentum", "--epochs", 100_000)
FAMILIES: dict[str, tuple[str, tuple[object, ...], dict[str, Any]]] = {
    "alone": ("train.py", SIZES, {"workers": 1}),
    "paced": ("train.py", SIZES, {"workers": 2, "protocol": "ssp"}),
    "peers": ("train.py", SIZES, {"workers": 2, "protocol": "local_sgd", "settings": {"period": 2}}),
    "gloo": ("train.py", SIZES, {"workers": 2, "protocol": "allreduce", "fabric": "gloo"}),
    "mesh": ("pipe.py", ("--epochs", EPOCHS), {"workers": 2, "mesh": {"stage": 2}, "protocol": "bp"}),
}


def until_stopped(zygote: int, running: Running | None = None) -> None:
    """Wait until nothing that workers do from now on can come before the stop."""
    wait_until(lambda: stop_arrived(zygote), "the stop has been passed on")
    if running is not None and running.config.mesh is not None:
        conductor, workers = running.store_pid, running.config.workers
        wait_until(lambda: stop_is_called(conductor, workers), "the workers are called")


@pytest.mark.some(7)
@pytest.mark.parametrize(
    ("family", "number"),
    [*((family, signal.SIGTERM) for family in FAMILIES), ("peers", signal.SIGHUP), ("paced", signal.SIGQUIT)],
)
def test_a_signal_to_every_process_at_once_saves_the_run_and_no_work_is_lost_or_done_twice(
    lab: Lab, family: str, number: signal.Signals
) -> None:
    script, args, dials = FAMILIES[family]
    running = lab.start(script, *args, *lab.pause(9), **dials)
    lab.until_paused(dials["workers"])
    zygote = lab.engine._process.pid
    for pid in (*children(zygote), zygote):
        os.kill(pid, number)
    until_stopped(zygote, running)
    lab.go_on()
    first = lab.finish(running)
    assert (first.result.status, first.end.detail) == ("stopped", "interrupted"), first.logs()
    assert set(first.ended.statuses.values()) == {0}
    second = lab.trained(script, *args, resume=str(first.folder / "checkpoint"), **dials)
    whole = once(EPOCHS, SAMPLES)
    assert family in ("alone", "mesh") or first.used() + second.used() == whole
    assert 0 < first.result.samples < first.result.samples + second.result.samples == whole.total()


HELPED = """
import sys
from cases import CASES
from pause import Pause
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join()
case = CASES["momentum"]
model, optimizer = case.build()
data = TensorDataset(*case.samples(48))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=4, num_workers=1))
pause = Pause(sys.argv[1], 4)
for epoch in pace.epochs(6):
    for x, y in loader:
        pause()
        case.iteration(model, optimizer, x, y)
"""


def test_processes_that_load_data_go_on_until_their_workers_have_saved(lab: Lab, in_scripts: Write) -> None:
    script, dials = in_scripts(HELPED), FAMILIES["peers"][2]
    running = lab.start(script, lab.root / "go on", **dials)
    lab.until_paused(2)
    zygote = lab.engine._process.pid
    helpers = [pid for worker in running.pids for pid in children(worker)]
    assert len(helpers) >= 2
    for pid in (*helpers, *children(zygote), zygote):
        os.kill(pid, signal.SIGTERM)
    until_stopped(zygote)
    lab.go_on()
    first = lab.finish(running)
    assert first.result.status == "stopped", first.logs()
    second = lab.trained(script, lab.root / "go on", resume=str(first.folder / "checkpoint"), **dials)
    assert first.used() + second.used() == once(EPOCHS, SAMPLES)


def paused_command(lab: Lab, tmp_path: Path, *flags: object, **how: Any) -> tuple[subprocess.Popen[str], int]:
    """A real command whose workers wait; and its zygote."""
    given = ("train", SCRIPTS / "train.py", "--workers", 2, "--protocol", "bsp", *flags, "--", *SIZES)
    command = start_command(*given, *lab.pause(9), cwd=tmp_path, **how)
    lab.until_paused(2)
    [zygote] = children(command.pid)
    return command, zygote


def goes_on(lab: Lab, tmp_path: Path, said: str) -> None:
    """The run that was named does what was left, and nothing twice."""
    stopped = (tmp_path / "runs/latest").resolve()
    script = SCRIPTS / "train.py"
    assert f"Its checkpoint is runs/{stopped.name}/checkpoint. " in said
    assert said.rstrip().endswith(f"Go on with: paceline train {script} --resume runs/{stopped.name}")
    again = lab.trained(script, *SIZES, resume=str(stopped / "checkpoint"), workers=2, protocol="bsp")
    pushes = (event for event in read_trace(stopped) if isinstance(event, Decided))
    before = Run.used_by(event for event in pushes if event.pushed is not None)
    assert before.total() > 0
    assert before + again.used() == once(EPOCHS, SAMPLES)


def test_the_command_and_all_it_started_save_the_run_of_one_signal_to_all(lab: Lab, tmp_path: Path) -> None:
    """And of a further one that belongs to it: `timeout` sends SIGTERM twice, systemd SIGHUP after it."""
    command, zygote = paused_command(lab, tmp_path)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
        for pid in lab.leftovers() - lab.idle:
            os.kill(pid, number)
    until_stopped(zygote)
    lab.go_on()
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 1
    [line] = error_lines(errors)
    goes_on(lab, tmp_path, line)
    wait_until(lambda: lab.leftovers() <= lab.idle, "everything is gone", 20)


def test_a_killed_command_leaves_a_run_that_saves_itself_and_says_how_to_go_on(
    lab: Lab, tmp_path: Path
) -> None:
    command, zygote = paused_command(lab, tmp_path)
    assert len(lab.leftovers() - lab.idle) == 5  # command, zygote, store and two workers
    command.kill()
    command.communicate()
    until_stopped(zygote)
    lab.go_on()
    wait_until(lambda: lab.leftovers() <= lab.idle, "everything is gone", 20)
    run = (tmp_path / "runs/latest").resolve()
    result = msgspec.json.decode((run / "result.json").read_bytes(), type=Result)
    assert result.status == read_record(run).result.status == "stopped"
    assert tally(read_trace(run)).end.detail.endswith("the process that started the run is gone")  # type: ignore[union-attr]
    said = (run / "logs" / "store.log").read_text()
    assert "The command that started this run is gone, so it was stopped." in said
    goes_on(lab, tmp_path, said)


def test_a_killed_starter_of_workers_leaves_a_store_that_saves_and_the_command_names_both(
    lab: Lab, tmp_path: Path
) -> None:
    command, zygote = paused_command(lab, tmp_path)
    os.kill(zygote, signal.SIGKILL)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 1
    [line] = error_lines(errors)
    assert re.match(
        r"error: the process that starts workers was ended by SIGKILL\. Its checkpoint is runs/\S+\. Go", line
    )
    wait_until(lambda: lab.leftovers() <= lab.idle, "everything is gone", 20)
    lab.go_on()
    goes_on(lab, tmp_path, line)


def test_a_terminal_that_closes_has_the_run_saved(lab: Lab, tmp_path: Path) -> None:
    mine, theirs = pty.openpty()
    words = ("train", SCRIPTS / "train.py", "--workers", 2, "--", *SIZES, *lab.pause(9))
    command = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, str(COMMAND), *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(theirs)
    lab.until_paused(2)
    [zygote] = children(command.pid)
    os.close(mine)
    until_stopped(zygote)
    lab.go_on()
    assert command.wait(timeout=60) == 1
    run = tmp_path / "runs/latest"
    result = msgspec.json.decode((run / "result.json").read_bytes(), type=Result)
    assert (result.status, (run / "checkpoint").is_dir()) == ("stopped", True)
    wait_until(lambda: lab.leftovers() <= lab.idle, "everything is gone", 20)


IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_request_ends_at_once_a_run_whose_workers_do_not_come_to_save(
    lab: Lab, tmp_path: Path, number: signal.Signals
) -> None:
    command, _ = paused_command(lab, tmp_path)
    assert command.stderr is not None
    os.kill(command.pid, number)
    assert any("stopping: saving" in line for line in command.stderr), "it tells, and goes on"
    time.sleep(0.6)  # what comes sooner belongs to the first
    os.kill(command.pid, number)
    command.communicate(timeout=60)
    assert command.returncode == 128 + number
    wait_until(lambda: lab.leftovers() <= lab.idle, "everything is gone", 20)
    end = tally(read_trace(tmp_path / "runs/latest")).end
    assert end is not None
    assert end.detail == f"ended at once by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}"


IGNORING = """
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from paceline.cli.running.common import heed_termination
heed_termination()
os.kill(os.getpid(), signal.SIGHUP)
try:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
except KeyboardInterrupt as error:
    print(error)
"""


def test_what_nohup_ignores_stays_ignored() -> None:
    done = subprocess.run([sys.executable, "-c", IGNORING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "SIGTERM\n"), done.stderr


FORKS = """
import os, signal
from paceline.fabric.stop_signals import wait_for_word
wait_for_word()
os.kill(os.getpid(), signal.SIGTERM)
child = os.fork()
if not child:
    signal.pause()
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_worker_outlives_a_signal_and_what_it_forks_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"-{int(signal.SIGTERM)}\n"), done.stderr
