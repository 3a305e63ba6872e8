"""Runs that fail: the command's exit status, and one line with rank, reason and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from paceline.trace import read_trace
from paceline.trace.events import Note
from support.shell import Outcome, Shell

Write = Callable[[str], Path]

HEAD = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from cases import CASES
import paceline

pace = paceline.join()
case = CASES["momentum"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(32)), batch_size=4)
"""
LOOP = """
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for x, y in loader:
    case.iteration(model, optimizer, x, y)
"""


def train(shell: Shell, script: Path, *flags: object) -> Outcome:
    return shell("train", script, "--protocol", "bsp", *flags)


def test_an_exception_in_the_script_is_told_with_rank_message_and_log(
    shell: Shell, in_scripts: Write
) -> None:
    script = in_scripts(HEAD + "if pace.rank == 1:\n    raise KeyError('no such column')\n" + LOOP)
    done = train(shell, script)
    assert done.code == 1
    assert "rank 1 failed: KeyError: 'no such column' (before training began)" in done.error
    assert "logs/" in done.error
    log = next((shell.runs / "latest" / "logs").glob("rank1.log"))
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("raised", ["RuntimeError('wrong')", "paceline.ConfigError('wrong')"])
def test_where_nothing_was_trained_nobody_is_told_to_go_on(
    shell: Shell, in_scripts: Write, raised: str, workers: int
) -> None:
    first = train(
        shell, in_scripts(HEAD + LOOP.replace("case.", f"raise {raised}\n    case.")), "-n", workers
    )
    assert "wrong" in first.error
    assert "--resume" not in first.error
    later = LOOP + f"    raise {raised}\n"
    assert "--resume" in train(shell, in_scripts(HEAD + later), "-n", workers).error


@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_in_which_every_worker_raises_fails_with_the_reason(
    shell: Shell, in_scripts: Write, workers: int
) -> None:
    done = train(
        shell, in_scripts(HEAD + LOOP + "    raise ValueError('bad\\nlabel')\n"), "--workers", workers
    )
    assert done.code == 1
    assert "ValueError: bad label" in done.error


def test_a_worker_that_raises_alone_is_an_error_though_the_others_finish_and_a_checkpoint_is_left(
    shell: Shell, in_scripts: Write
) -> None:
    script = in_scripts(HEAD + LOOP + "    if pace.rank == 1:\n        raise ValueError('alone')\n")
    done = shell("train", script, "--json")
    assert done.code == 1
    assert [(f["worker"], f["reason"], f["detail"]) for f in done.json["failures"]] == [
        (1, "failed", "ValueError: alone")
    ]
    assert (done.json["status"], done.json["samples"]) == ("finished", 32)
    folder = shell.runs / done.json["run"]
    assert msgspec.json.decode((folder / "result.json").read_bytes()) == done.json
    assert "rank 1 failed: ValueError: alone. The others finished without it." in done.error
    assert f"{folder}/logs/rank1.log" in done.error
    assert f"Its checkpoint is {folder}/checkpoint." in done.error
    asked = shlex.split(done.error.partition("Go on with: paceline train ")[2])
    script.write_text(script.read_text().replace("raise ValueError", "ValueError"))
    assert shell("train", *asked).code == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_names_the_checkpoint_and_the_command_to_go_on(
    shell: Shell, in_scripts: Write, workers: int
) -> None:
    script = in_scripts(HEAD + LOOP + "    raise ValueError('all')\n")
    done = train(shell, script, "--workers", workers)
    assert done.code == 1
    folder = (shell.runs / "latest").resolve()
    assert f"Its checkpoint is {folder}/checkpoint." in done.error
    asked = shlex.split(done.error.partition("Go on with: paceline train ")[2])
    script.write_text(script.read_text().replace("raise ValueError", "ValueError"))
    assert shell("train", *asked, "--json").json["samples"] == 32 - 4 * workers


def test_over_gloo_a_worker_that_dies_ends_the_run_with_its_rank_named(
    shell: Shell, in_scripts: Write
) -> None:
    script = in_scripts(HEAD + LOOP + "    if pace.rank == 1:\n        os.kill(os.getpid(), 9)\n")
    done = shell("train", script, "--protocol", "allreduce", "--fabric", "gloo", "--workers", 3)
    assert done.code == 1
    assert "rank 1 was lost, and over gloo the others cannot continue without it" in done.error
    assert "Rank 1 ended by SIGKILL" in done.error


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("text", ["x = (\n", "import no_such_module_anywhere\n", "raise SystemExit(3)\n"])
def test_a_script_that_does_not_get_as_far_as_join_fails(
    shell: Shell, in_scripts: Write, text: str, workers: int
) -> None:
    done = train(shell, in_scripts(text), "--workers", workers)
    assert done.code == 1
    assert any(word in done.error for word in ("SyntaxError", "no_such_module_anywhere", "exited with 3"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_that_never_joins_is_a_mistake(shell: Shell, in_scripts: Write, workers: int) -> None:
    done = train(shell, in_scripts("print('hello')\n"), "--workers", workers)
    assert done.code == 2
    assert "never called paceline.join" in done.error


@pytest.mark.parametrize("trains", ["", "for epoch in pace.epochs(1): pass\n"], ids=["nothing", "epochs"])
def test_a_script_that_never_prepares_is_a_mistake(shell: Shell, in_scripts: Write, trains: str) -> None:
    done = train(shell, in_scripts("import paceline\npace = paceline.join()\n" + trains))
    assert done.code == 2
    assert "pace.prepare" in done.error


def test_evaluating_before_there_is_a_model_is_a_mistake(shell: Shell, in_scripts: Write) -> None:
    text = "import paceline\npace = paceline.join()\npace.evaluate(lambda model: 0.5)\n"
    done = train(shell, in_scripts(text))
    assert done.code == 2
    assert "pace.evaluate() before pace.prepare()" in done.err


DIFFERENT = {
    "model": ("model = nn.Linear(6, 3 + pace.rank).double()\n", "different models: weight [3, 6] against"),
    "depth": (
        "model = nn.Sequential(*[nn.Linear(6, 6).double() for _ in range(1 + pace.rank)])\n",
        "2 against 4 parameters",
    ),
    "frozen": ("model[0].requires_grad_(pace.rank == 0)\n", "different models"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_workers_whose_models_differ_are_a_mistake(shell: Shell, in_scripts: Write, what: str) -> None:
    change, words = DIFFERENT[what]
    again = "optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)\n"
    done = train(shell, in_scripts(HEAD + change + again + LOOP))
    assert done.code == 2
    assert words in done.error
    assert "ranks 0 and 1" in done.error


@pytest.mark.parametrize(
    "change",
    [
        "optimizer = [torch.optim.SGD, torch.optim.Adam][pace.rank](model.parameters(), lr=0.1)\n",
        "loader = DataLoader(TensorDataset(*case.samples(32)), batch_size=4 + pace.rank)\n",
    ],
)
def test_workers_whose_optimizers_or_loaders_differ_are_a_mistake(
    shell: Shell, in_scripts: Write, change: str
) -> None:
    done = train(shell, in_scripts(HEAD + change + LOOP))
    assert done.code == 2
    assert "different optimizers or loaders" in done.error


def test_workers_that_name_different_protocols_are_a_mistake(shell: Shell, in_scripts: Write) -> None:
    script = HEAD.replace("join()", "join(['bsp', 'asp'][os.getpid() % 2])")
    script = script.replace("os.getpid() % 2", "'rank1' in os.readlink('/proc/self/fd/1')")
    done = shell("train", in_scripts(script + LOOP))
    assert done.code == 2
    assert "workers name different protocols" in done.error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizer = torch.optim.LBFGS(model.parameters())\n", "LBFGS cannot run on several workers"),
        ("optimizer = torch.optim.SparseAdam(model.parameters())\n", "it needs sparse gradients"),
        (
            "class Mine(torch.optim.SGD): pass\noptimizer = Mine(model.parameters(), lr=0.1)\n",
            "step in its worker: with --apply increments, or with a protocol that has no store (--protocol "
            "allreduce or local_sgd)",
        ),
        ("model.requires_grad_(False)\n", "nothing to train"),
        ("loader = DataLoader(TensorDataset(*case.samples(4)), batch_size=4)\n", "1 batches per epoch for 2"),
        (
            "loader = [loader, loader]\npace.prepare(model, optimizer, *loader)\n",
            "one training loader, got 2",
        ),
    ],
)
def test_what_the_store_cannot_train_is_a_mistake(
    shell: Shell, in_scripts: Write, change: str, words: str
) -> None:
    done = train(shell, in_scripts(HEAD + change + LOOP))
    assert done.code == 2
    assert words in done.error


NAN = LOOP.replace(
    "    case.iteration",
    "    if x[0, 0] == case.samples(32)[0][20, 0]:\n        x[0, 0] = float('nan')\n    case.iteration",
)


@pytest.mark.parametrize("protocol", ["bsp", "asp"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_gradient_that_is_not_finite_stops_the_run_with_rank_and_parameter(
    shell: Shell, in_scripts: Write, workers: int, protocol: str
) -> None:
    """Of all parameters the first layer's weight is the first in which it shows."""
    script = in_scripts(HEAD + NAN)
    done = shell("train", script, "--protocol", protocol, "--workers", workers)
    assert done.code == 1
    assert "NaN or infinity in" in done.error
    assert "'0.weight'" in done.error
    assert "rank " in done.error
    assert "--bad-gradient skip" in done.error
    assert "Traceback" not in done.err


@pytest.mark.parametrize("protocol", ["bsp", "asp"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_gradient_that_is_not_finite_can_be_skipped_and_is_counted(
    shell: Shell, in_scripts: Write, workers: int, protocol: str
) -> None:
    script = in_scripts(HEAD + NAN)
    flags = ("--protocol", protocol, "--workers", workers, "--bad-gradient", "skip", "--json")
    done = shell("train", script, *flags)
    assert done.code == 0
    folder = shell.runs / "latest"
    events = list(read_trace(folder))
    assert [e.fate for e in events if getattr(e, "pushed", None) is not None].count("skip") == 1
    assert any("1 gradients were not finite" in e.text for e in events if isinstance(e, Note))
    assert done.json["samples"] == 32


@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_that_exits_before_it_joins_is_told_from_one_that_never_does(
    shell: Shell, in_scripts: Write, workers: int
) -> None:
    done = train(shell, in_scripts("import sys\nsys.exit()\n" + HEAD + LOOP), "--workers", workers)
    assert done.code == 2
    assert "exited by itself before it called paceline.join" in done.error


def test_a_run_that_fails_leaves_the_others_their_turn_and_their_place_in_the_table(
    shell: Shell, in_scripts: Write
) -> None:
    crash = "    if pace._trainer.shared: __import__('ctypes').string_at(0)\n"
    script = in_scripts(HEAD + LOOP + crash)
    done = shell("compare", script, "--protocols", "asp,bsp,ssp", "-n", 2, "--json")
    assert done.code == 1
    assert [result["protocol"] for result in done.json] == ["asp", "ssp"]
    assert "not finished by all workers: bsp. " in done.error
    assert "SIGSEGV" in done.error
    assert (shell.runs / "report.html").is_file()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "",
            "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(2))]})\n",
            "after pace.prepare()",
        ),
        ("model[0].requires_grad_(False)\n", "model[0].requires_grad_(True)\n", "frozen when the model was"),
    ],
)
def test_what_changes_after_prepare_and_would_not_be_trained_is_a_mistake(
    shell: Shell, in_scripts: Write, before: str, after: str, words: str
) -> None:
    prepared = "model, optimizer, loader = pace.prepare(model, optimizer, loader)\n"
    script = in_scripts(HEAD + before + LOOP.replace(prepared, prepared + after))
    done = train(shell, script)
    assert done.code == 2
    assert words in done.error


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("pace.evaluate(lambda model: None)", "accuracy in pace.evaluate takes a number, got None"),
        ("pace.report(note='late')", "pace.report(note=...) takes a number, got 'late'"),
    ],
)
def test_what_is_no_number_ends_the_run_with_its_name_and_value(
    shell: Shell, in_scripts: Write, line: str, told: str
) -> None:
    done = train(shell, in_scripts(HEAD + LOOP + f"    if pace.lead:\n        {line}\n"))
    assert done.code == 2
    assert told in done.error


def test_a_loss_that_still_needs_its_gradient_is_reported_without_a_warning(
    shell: Shell, in_scripts: Write
) -> None:
    body = (
        "import warnings\nwarnings.simplefilter('error')\n" + LOOP + "    pace.report(loss=model(x).sum())\n"
    )
    assert train(shell, in_scripts(HEAD + body)).code == 0


def test_data_that_prepare_cannot_share_is_mentioned_once(shell: Shell, in_scripts: Write) -> None:
    done = train(shell, in_scripts(HEAD + "loader = list(loader)\n" + LOOP))
    assert done.code == 0
    assert done.err.count("prepare did not change a list: every worker sees all of it") == 1
