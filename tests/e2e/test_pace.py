"""What a script can say and ask: evaluate, report, leave, epochs, and its place in the run."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.trace.events import Evaluated, Note, Planned, Reported, WorkerLeft
from support.runs import Lab, wait_until

Write = Callable[[str], Path]

HEAD = """
import sys, time
from pathlib import Path
import torch
from torch import nn
import paceline


class Level(nn.Module):
    '''Every update moves all weights by one: their value tells how many there were.'''

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(100_000, dtype=torch.float64))


def iterate():
    (-model.w.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


pace = paceline.join()
model = Level()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
"""
PREPARED = HEAD + "model, optimizer = pace.prepare(model, optimizer)\n"

EVALUATING = (
    PREPARED
    + """
def look(model):
    assert pace.lead and not model.training and not torch.is_grad_enabled()
    before = model.w.clone()
    time.sleep(0.03)  # the others push meanwhile, unless they have to wait
    assert torch.equal(before, model.w), "the snapshot changed"
    assert bool((before == before[0]).all()), "half an update is in the snapshot"
    return {"accuracy": 0.5, "updates": before[0]}


for step in range(30):
    iterate()
    if step % 10 == 4:
        figures = pace.evaluate(look)
        assert (figures is not None) == pace.lead
        assert model.training
"""
)


@pytest.mark.parametrize("protocol", ["bsp", "asp", "ssp", "dssp"])
def test_the_lead_alone_evaluates_and_its_snapshot_is_whole_and_stands_still(
    lab: Lab, in_scripts: Write, protocol: str
) -> None:
    run = lab.trained(
        in_scripts(EVALUATING),
        workers=3,
        protocol=protocol,
        weighting=1.0 / 3 if protocol == "bsp" else "sum",
    )
    evaluations = run.of(Evaluated)
    assert [event.worker for event in evaluations] == [0, 0, 0]
    assert all(event.values["updates"] == event.version for event in evaluations)
    assert run.result.accuracy == 0.5
    assert torch.equal(run.weights["w"], torch.full((100_000,), float(run.result.updates)).double())


def test_nobody_waits_for_a_lead_that_evaluates_unless_in_lockstep(lab: Lab, in_scripts: Write) -> None:
    """With a bound of one iteration the others would stand still; the lead steps aside instead."""
    script = (
        PREPARED
        + """
iterate()
if pace.lead:
    ahead = Path(sys.argv[1])
    pace.evaluate(lambda: float(wait_for(ahead)))
else:
    for _ in range(20):
        iterate()
    Path(sys.argv[1]).touch()
"""
    )
    script = script.replace(
        "pace = paceline",
        """
def wait_for(path):
    for _ in range(1000):
        if path.exists():
            return 1
        time.sleep(0.02)
    return 0


pace = paceline""",
    )
    file = lab.root / "ahead"
    run = lab.trained(in_scripts(script), file, workers=2, protocol="ssp", settings={"staleness": 1})
    assert run.of(Evaluated)[0].values == {"accuracy": 1.0}
    assert [event.reason for event in run.of(WorkerLeft) if event.worker == 0] == ["away", "finished"]


def test_what_a_script_reports_is_in_the_trace_with_worker_and_clock(lab: Lab, in_scripts: Write) -> None:
    script = (
        PREPARED
        + """
for step in range(5):
    pace.report(loss=10 * pace.rank + step, extra=torch.tensor(2.5))
    iterate()
pace.report(loss=float("nan"), last=1)
"""
    )
    run = lab.trained(in_scripts(script), workers=2, protocol="asp")
    for rank in (0, 1):
        *told, last = [event for event in run.of(Reported) if event.worker == rank]
        assert [event.clock for event in told] == [1, 2, 3, 4, 5]
        assert [event.values for event in told] == [
            {"loss": 10.0 * rank + step, "extra": 2.5} for step in range(5)
        ]
        assert last.values["last"] == 1
        assert math.isnan(last.values["loss"])


def test_evaluation_leaves_every_part_of_the_model_in_its_mode(lab: Lab, in_scripts: Write) -> None:
    """Somebody who keeps a part in evaluation mode on purpose finds it there afterwards."""
    script = (
        HEAD
        + """
model.part = nn.BatchNorm1d(2).double()
model, optimizer = pace.prepare(model, optimizer)
model.part.eval()
iterate()
pace.evaluate(lambda model: float(not model.training))
assert model.training and not model.part.training
"""
    )
    for workers in (1, 2):
        assert lab.trained(in_scripts(script), workers=workers).result.accuracy == 1.0


@pytest.mark.parametrize("protocol", ["bsp", "ssp"])
def test_a_worker_that_leaves_frees_the_others(lab: Lab, in_scripts: Write, protocol: str) -> None:
    """It stays until the others are done; they would wait for it for ever if it still took part."""
    script = (
        PREPARED
        + """
done = Path(sys.argv[1])
for step in range(20):
    if pace.rank == 1 and step == 3:
        pace.leave()
        pace.leave()
        while not done.exists():
            time.sleep(0.01)
        break
    iterate()
if pace.lead:
    done.touch()
"""
    )
    run = lab.trained(in_scripts(script), lab.root / "done", workers=2, protocol=protocol)
    assert [push.pushed for push in run.pushes].count(1) == 3
    assert [push.pushed for push in run.pushes].count(0) == 20
    assert run.result.failures == []


def test_a_step_after_leave_is_an_error_of_that_worker(lab: Lab, in_scripts: Write) -> None:
    run = lab.run(in_scripts(PREPARED + "pace.leave()\niterate()\n"), workers=2)
    assert run.ended.statuses == {0: 1, 1: 1}
    assert "optimizer.step() after pace.leave()" in run.log("rank1")


def test_epochs_counts_and_tells_the_plan(lab: Lab, in_scripts: Write) -> None:
    script = PREPARED + "assert [iterate() or epoch for epoch in pace.epochs(4)] == [0, 1, 2, 3]\n"
    for workers in (1, 2):
        run = lab.trained(in_scripts(script), workers=workers)
        assert [event.epochs for event in run.of(Planned)] == [4]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (HEAD + "paceline.join()\n", "join was called twice"),
        (PREPARED + "pace.prepare(model, optimizer)\n", "prepare was called twice"),
        (HEAD + "pace.prepare(model)\n", "at least one optimizer"),
        (HEAD + "pace.prepare(optimizer, optimizer, model)\n", "share a parameter"),
        ("import paceline\npaceline.join(staleness=3)\n", "without a protocol"),
        ("import paceline\npaceline.join('spp')\n", "Did you mean 'ssp'?"),
        ("import paceline\npaceline.join('ssp', stalenes=3)\n", "Did you mean 'staleness'?"),
        ("import paceline\npaceline.join('ssp', staleness=-1)\n", "must be >= 0"),
        ("x = 1\n", "never called paceline.join"),
    ],
)
def test_a_wrong_call_is_the_users_mistake_and_says_what_is_wrong(
    lab: Lab, in_scripts: Write, script: str, words: str, workers: int
) -> None:
    run = lab.run(in_scripts(script), workers=workers)
    assert run.result.status == "failed"
    assert words in run.end.detail
    assert run.end.user_mistake


def test_the_protocol_named_in_the_script_is_used_unless_the_command_names_another(
    lab: Lab, in_scripts: Write
) -> None:
    script = in_scripts(PREPARED.replace("join()", "join('ssp', staleness=5)") + "iterate()\n")
    named = lab.trained(script, workers=2)
    assert (named.result.protocol, named.result.settings) == ("ssp", {"staleness": 5})
    overruled = lab.trained(script, workers=2, protocol="asp")
    assert overruled.result.protocol == "asp"
    assert "the script names protocol 'ssp'; the command's 'asp' wins" in [n.text for n in overruled.of(Note)]
    adjusted = lab.trained(script, workers=2, protocol="ssp", settings={"staleness": "1"})
    assert adjusted.result.settings == {"staleness": 1}


def test_only_the_lead_prints_and_everybody_knows_its_place(lab: Lab, in_scripts: Write) -> None:
    script = PREPARED + "pace.print('hello from', pace.rank)\nprint(pace.rank, 'of', pace.size)\niterate()\n"
    run = lab.trained(in_scripts(script), workers=3)
    assert run.log("rank0").splitlines() == ["hello from 0", "0 of 3"]
    assert [run.log(f"rank{rank}") for rank in (1, 2)] == ["1 of 3\n", "2 of 3\n"]


def test_a_script_runs_alone_without_any_engine(in_scripts: Write) -> None:
    script = in_scripts(
        EVALUATING + "assert (pace.rank, pace.size, pace.lead) == (0, 1, True)\nprint('fine')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_who_joins_again_after_leaving_reads_in_its_log_that_it_cannot_come_back(
    lab: Lab, in_scripts: Write
) -> None:
    run = lab.run(in_scripts(PREPARED + "iterate()\npace.leave()\npaceline.join()\n"), workers=2)
    assert run.ended.statuses == {0: 1, 1: 1}
    assert "join() was called again after pace.leave()" in run.log("rank1")


def test_alone_a_cell_that_joins_and_prepares_may_be_run_again(in_scripts: Write) -> None:
    """As in a notebook: with the same objects, after leaving or not; the last pace is the one that counts."""
    script = in_scripts(
        EVALUATING
        + """
first = pace
for leaves in (True, False):
    if leaves:
        pace.leave()
    pace = paceline.join()
    before = [p.clone() for p in model.parameters()]
    model, optimizer = pace.prepare(model, optimizer)
    iterate()
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before))
    assert pace.evaluate(lambda: 0.5) == {"accuracy": 0.5}
    assert pace is not first and first.left and not pace.left
print('fine')
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_a_lead_killed_while_it_evaluates_is_not_waited_for(lab: Lab, in_scripts: Write) -> None:
    script = (
        PREPARED
        + """
for step in range(20):
    iterate()
    if step == 3:
        pace.evaluate(lambda: Path(sys.argv[1]).touch() or time.sleep(600))
"""
    )
    for protocol in ("bsp", "ssp"):
        file = lab.root / f"{protocol} evaluates"
        running = lab.start(in_scripts(script), file, workers=3, protocol=protocol)
        wait_until(file.exists, "the lead evaluates")
        running.kill(0)
        run = lab.finish(running)
        assert run.result.status == "finished"
        assert run.died == {0}
        assert [push.pushed for push in run.pushes].count(1) == 20
