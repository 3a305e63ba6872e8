"""Workers that are lost before training begins: the others go on without them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.trace.events import WorkerJoined
from support.runs import Lab, once
from support.shell import Shell
from support.tensors import assert_finite

Write = Callable[[str], Path]
pytestmark = pytest.mark.timeout(100)

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

victim = Path(sys.argv[0]).with_suffix(".victim")
def lives():
    if not victim.exists() or not victim.read_text().endswith(" "):
        return True
    try:
        stat = Path(f"/proc/{victim.read_text().strip()}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"

pace = paceline.join()
if str(pace.rank) == sys.argv[1] and "registered" not in sys.argv:
    os.kill(os.getpid(), 9)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(96, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
if str(pace.rank) == sys.argv[1]:
    send = pace._link._send
    def and_die(*message):
        send(*message)
        victim.write_text(f"{os.getpid()} ")
        os.kill(os.getpid(), 9)
    pace._link._send = and_die
elif "registered" in sys.argv:
    while lives():
        time.sleep(0.005)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    for a, b in loader:
        optimizer.zero_grad()
        (model(a) - b).square().mean().backward()
        optimizer.step()
"""
CASES = [
    ("bsp", 0, ()),
    ("bsp", 0, ("registered",)),
    ("dssp", 1, ()),
    ("asp", 2, ("registered",)),
    ("psp", 0, ()),
    ("allreduce", 0, ()),
    ("local_sgd", 1, ()),
    ("dpsgd", 0, ()),
    ("ds_sync", 2, ()),
    ("osp", 1, ()),
    ("ad_psgd", 1, ()),
]


@pytest.mark.parametrize(("protocol", "victim", "words"), CASES)
def test_whoever_is_killed_before_all_have_joined_the_others_do_all_of_the_work(
    lab: Lab, in_scripts: Write, protocol: str, victim: int, words: tuple[str, ...]
) -> None:
    """Rank 0 may take its initial weights along: then those of the next one are taken."""
    run = lab.trained(in_scripts(SCRIPT), victim, *words, workers=3, protocol=protocol)
    assert run.ended.statuses[victim] == -signal.SIGKILL
    assert run.used() == once(2, 96)
    assert {event.worker for event in run.of(WorkerJoined)} == {0, 1, 2} - {victim}
    (failure,) = run.result.failures
    assert (failure.worker, failure.reason) == (victim, "died")
    assert failure.detail.endswith("(before training began)")
    assert_finite(run.weights)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--on-failure", "stop"), "rank 1 died before training began"),
        (("--protocol", "allreduce", "--fabric", "gloo"), "Over gloo the others cannot continue without it."),
    ],
)
def test_where_nobody_may_or_can_go_on_one_sentence_says_so(
    shell: Shell, in_scripts: Write, flags: tuple[str, ...], told: str
) -> None:
    done = shell("train", in_scripts(SCRIPT), "--workers", 3, *flags, "--", 1)
    assert done.code == 1
    assert told in done.error


def test_a_run_that_began_without_a_worker_is_replayed_without_it(shell: Shell, in_scripts: Write) -> None:
    script = in_scripts(SCRIPT)
    assert shell("train", script, "--workers", 3, "--protocol", "asp", "--", 1).code == 0
    replayed = shell("replay", (shell.runs / "latest").resolve())
    assert replayed.code == 0, replayed.err
