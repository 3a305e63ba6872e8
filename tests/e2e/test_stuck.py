"""Workers that are stuck: they are named, `paceline why` tells where they are, and --stuck-after acts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.running.ending import finish
from paceline.trace.events import Heard, Silent
from paceline.trace.waits import NOTICES
from paceline.view.why import WorkerWhereabouts, lines, why
from support.runs import Lab, Running, once, wait_until
from support.shell import Shell

Write = Callable[[str], Path]
pytestmark = pytest.mark.timeout(100)

SCRIPT = """
import os, sys, threading
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

pace = paceline.join()
stuck, sign = pace.rank == 1 and sys.argv[1], Path(sys.argv[2])
if stuck == "early":
    sign.touch()
    deadlock()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(96, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(3):
    for a, b in loader:
        optimizer.zero_grad()
        (model(a) - b).square().mean().backward()
        optimizer.step()
        if stuck and epoch == 1 and not sign.exists():
            sign.touch()
            deadlock() if stuck == "lock" else os.kill(os.getpid(), 19)
"""


def start(lab: Lab, script: Path, how: str, sign: Path, **dials: Any) -> Running:
    """A run of three in which rank 1 gets stuck."""
    running = lab.start(script, how, sign, workers=3, **dials)
    (running.config.path / "config.json").write_bytes(json_of(running))
    wait_until(sign.exists, "rank 1 is stuck")
    return running


def json_of(running: Running) -> bytes:
    import msgspec

    return msgspec.json.encode(running.config)


def until_named(running: Running) -> None:
    wait_until(lambda: running.events(Silent) > 0, "rank 1 is named")


def ranked(folder: Path) -> dict[int, WorkerWhereabouts]:
    return {each.rank: each for each in why(folder).workers}


def test_a_worker_that_was_stopped_is_named_with_who_waits_for_it_and_comes_back(
    lab: Lab, in_scripts: Write, tmp_path: Path
) -> None:
    running = start(lab, in_scripts(SCRIPT), "stop", tmp_path / "sign", protocol="bsp")
    until_named(running)
    told = ranked(running.config.path)
    assert (told[1].state, told[1].process, told[1].waited_for_by) == ("computing", "T", (0, 2))
    assert told[1].since_s >= 8
    assert "kill -CONT" in told[1].note
    assert [(told[rank].state, told[rank].waits_for) for rank in (0, 2)] == [("waiting", (1,))] * 2
    assert told[0].call == "optimizer.step"
    os.kill(running.pids[1], signal.SIGCONT)
    run = lab.finish(running)
    assert run.result.status == "finished"
    assert [(each.worker, each.waiting) for each in run.of(Silent)] == [(1, (0, 2))]
    assert [each.worker for each in run.of(Heard)] == [1]
    assert run.used() == once(3, 96)


@pytest.mark.parametrize("protocol", ["ssp", "local_sgd", "allreduce"])
def test_the_stack_of_a_worker_in_a_deadlock_is_told_and_training_is_not_disturbed(
    lab: Lab, in_scripts: Write, tmp_path: Path, protocol: str
) -> None:
    dials = {"protocol": protocol, "stuck_after": "1s"}
    running = start(lab, in_scripts(SCRIPT), "lock", tmp_path / "sign", **dials)
    until_named(running)
    told = why(running.config.path)
    stuck = next(each for each in told.workers if each.rank == 1)
    assert stuck.threads[0].frames[0].function == "deadlock"
    page = "\n".join(lines(told))
    assert "in deadlock" in page
    assert "waits on rank 1 for" in page
    assert "waiting" not in {each.state for each in told.workers if each.rank == 1}
    running.kill(1)
    run = lab.finish(running)
    assert run.result.status == "finished"
    assert {rank: run.ended.statuses[rank] for rank in (0, 2)} == {0: 0, 2: 0}


@pytest.mark.parametrize("how", ["lock", "stop"])
@pytest.mark.parametrize("protocol", ["bsp", "asp", "local_sgd", "allreduce"])
def test_a_stuck_worker_is_dropped_as_if_it_had_died(
    lab: Lab, in_scripts: Write, tmp_path: Path, protocol: str, how: str
) -> None:
    dials = {"protocol": protocol, "stuck_after": "1s:drop"}
    run = lab.finish(start(lab, in_scripts(SCRIPT), how, tmp_path / "sign", **dials))
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(3, 96)
    assert run.died == {1}
    assert "(--stuck-after 1s:drop)" in run.result.failures[0].detail


def test_a_stuck_worker_can_stop_the_run_which_is_saved(lab: Lab, in_scripts: Write, tmp_path: Path) -> None:
    dials = {"protocol": "bsp", "stuck_after": "1s:stop"}
    run = lab.finish(start(lab, in_scripts(SCRIPT), "stop", tmp_path / "sign", **dials))
    assert run.result.status == "failed"
    assert run.end.detail.startswith("rank 1 was silent for ")
    with pytest.raises(Exception, match="Go on with: paceline train") as error:
        finish(run.config, run.ended)
    assert f"Its checkpoint is {run.folder}/checkpoint" in str(error.value)


def test_whoever_keeps_the_others_from_beginning_is_named_before_there_is_a_trace(
    lab: Lab, in_scripts: Write, tmp_path: Path
) -> None:
    dials = {"protocol": "bsp", "stuck_after": "1s:warn"}
    running = start(lab, in_scripts(SCRIPT), "early", tmp_path / "sign", **dials)
    wait_until((running.config.path / NOTICES).exists, "rank 1 is named")
    told = ranked(running.config.path)
    assert (told[1].state, told[1].waited_for_by) == ("preparing", (0, 2))
    assert told[0].call == "pace.prepare"
    running.kill(1)
    run = lab.finish(running)
    assert "rank 1 is silent for" in (run.folder / NOTICES).read_text()
    assert run.result.status == "finished"


def test_of_a_run_that_is_over_the_command_tells_how_it_ended(shell: Shell, in_scripts: Write) -> None:
    script = in_scripts(SCRIPT.replace("sys.argv[1]", "''").replace("sys.argv[2]", "'x'"))
    assert shell("train", script, "--workers", 2, "--protocol", "asp").code == 0
    latest = shell.runs / "latest"
    done = shell("why", latest, "--json")
    assert (done.code, done.json["status"], done.json["workers"]) == (0, "finished", [])
    trace = latest / "trace.jsonl"
    *events, _ = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join(events))
    killed = shell("why", latest)
    assert "interrupted" in killed.out
    assert shell("why", shell.runs / "nothing").code == 2


@pytest.mark.parametrize("text", ["5", "m", "-5m", "5m:kill", "infs", ":drop"])
def test_what_stuck_after_does_not_know_is_a_mistake(shell: Shell, in_scripts: Write, text: str) -> None:
    done = shell("train", in_scripts(SCRIPT), f"--stuck-after={text}")
    assert done.code == 2
    assert f"got {text!r}" in done.error
    assert "5m:drop" in done.error


def test_answers_are_one_json_document(shell: Shell, in_scripts: Write) -> None:
    script = in_scripts(SCRIPT.replace("sys.argv[1]", "''").replace("sys.argv[2]", "'x'"))
    assert shell("train", script, "--workers", 1).code == 0
    assert json.loads(shell("why", shell.runs / "latest", "--json").out)["protocol"] == "bsp"
