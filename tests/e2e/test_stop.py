"""A script that ends training for all: everybody's loop ends, and the run is finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.trace.events import WorkEnded, WorkerLeft
from paceline.view.report.report import write_report
from support.runs import Lab, Run
from support.shell import Shell

Write = Callable[[str], Path]
pytestmark = pytest.mark.timeout(100)

EPOCHS = 200
SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
import paceline


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(40, 2))


pace = paceline.join()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = Stream() if "stream" in sys.argv else torch.ones(40, 2)
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=4))
epochs = 0
for epoch in pace.epochs(200):
    epochs += 1
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if "midway" in sys.argv and pace.rank == 1 and epoch == 2:
            pace.stop("far enough")
    values = pace.evaluate(lambda model: 0.5)
    if values is not None and epoch == 2 and "midway" not in sys.argv:
        pace.stop("accurate enough")
        pace.stop("once more")
assert pace.stopped
print(f"rank {pace.rank}: {epochs} epochs, and what comes after the loop")
"""


def page(folder: Path) -> str:
    """The report of a run."""
    return write_report([folder], folder / "report.html").read_text()


def check(run: Run, workers: int, why: str) -> None:
    """All ended early, in good order."""
    assert run.end.status == "finished"
    assert [event.why for event in run.of(WorkEnded)] == [why]
    assert {event.reason for event in run.of(WorkerLeft)} <= {"finished", "away"}
    for rank in range(workers):
        assert "and what comes after the loop" in run.log(f"rank{rank}")
    assert 40 <= run.result.samples < EPOCHS * 20
    assert run.weights
    assert f"rank {run.of(WorkEnded)[0].worker} ended training for all: {why}" in page(run.folder)
    assert not (run.folder / "checkpoint").exists()


@pytest.mark.parametrize(
    "dials",
    [
        {"protocol": "bsp"},
        {"protocol": "dssp"},
        {"protocol": "psp", "settings": {"form": "distributed"}},
        {"protocol": "local_sgd"},
        {"protocol": "allreduce", "fabric": "gloo"},
        {"protocol": "ad_psgd"},
    ],
    ids=lambda dials: "-".join(map(str, dials.values())),
)
@pytest.mark.parametrize("words", [(), ("midway",), ("stream",)], ids=["end", "midway", "stream"])
def test_a_script_can_end_training_for_all(
    lab: Lab, in_scripts: Write, dials: dict[str, Any], words: tuple[str, ...]
) -> None:
    run = lab.trained(in_scripts(SCRIPT), *words, workers=3, **dials)
    check(run, 3, "far enough" if words == ("midway",) else "accurate enough")


def test_alone_a_script_can_end_training_too(lab: Lab, in_scripts: Write) -> None:
    run = lab.trained(in_scripts(SCRIPT), workers=1)
    check(run, 1, "accurate enough")
    assert "rank 0: 3 epochs" in run.log()


def test_a_simulated_run_ends_early_and_repeats(shell: Shell, in_scripts: Write) -> None:
    script = in_scripts(SCRIPT)
    asked = ("simulate", script, "--workers", 3, "--protocol", "ssp", "--slow", "1:3", "--json")
    ends = [shell(*asked).json for _ in range(2)]
    assert ends[0]["samples"] == ends[1]["samples"] < EPOCHS * 20
    assert ends[0]["status"] == "finished"


def test_a_replay_goes_as_far_as_the_record_tells(shell: Shell, in_scripts: Write) -> None:
    assert shell("train", in_scripts(SCRIPT), "--workers", 2, "--protocol", "asp").code == 0
    run = (shell.runs / "latest").resolve()
    refused = shell("replay", run)
    assert refused.code == 2
    assert "ended this run with pace.stop()" in refused.err
    assert shell("replay", run, "--until", 10).code == 0
