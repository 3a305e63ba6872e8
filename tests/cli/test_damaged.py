"""`--resume` when a checkpoint is damaged: the file is named, and the checkpoint before it is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from paceline.store.disk.checksums import MANIFEST
from paceline.trace import read_trace
from paceline.trace.events import Note
from support.shell import Shell

Write = Callable[[str], Path]
SCRIPT = """
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from cases import CASES
import paceline

pace = paceline.join()
case = CASES["momentum"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(64)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for number, (x, y) in enumerate(loader):
    if number == 7 and not (Path(__file__).parent / "mended").exists():
        raise ValueError("not yet")
    case.iteration(model, optimizer, x, y)
"""
KINDS = {
    "one worker": ("--workers", 1),
    "a store": ("--protocol", "bsp", "--workers", 2),
    "peers": ("--protocol", "local_sgd", "--set", "period=2", "--workers", 2),
}


def flip(path: Path) -> None:
    """The last bit of a file: in a tensor, or a bracket."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def failed(shell: Shell, script: Path, kind: str) -> Path:
    """A run that ended early, with two checkpoints."""
    done = shell("train", script, *KINDS[kind], "--on-failure", "stop", "--checkpoint-every", 2)
    assert done.code == 1, done.err
    run = (shell.runs / "latest").resolve()
    assert sorted(path.name for path in run.glob("checkpoint*")) == ["checkpoint", "checkpoint.previous"]
    (script.parent / "mended").touch()
    return run


def version(checkpoint: Path) -> int:
    [state] = (path for path in checkpoint.iterdir() if path.name in ("state.json", "lone.json"))
    return int(msgspec.json.decode(state.read_bytes())["version"])


@pytest.mark.parametrize(
    ("kind", "file"),
    [("one worker", "lone.json"), ("a store", "model.safetensors"), ("peers", "rank1.safetensors")],
)
def test_the_damaged_file_is_named_and_the_run_goes_on_from_the_checkpoint_before(
    shell: Shell, in_scripts: Write, kind: str, file: str
) -> None:
    script = in_scripts(SCRIPT)
    run = failed(shell, script, kind)
    newest, before = run / "checkpoint", run / "checkpoint.previous"
    assert version(newest) >= version(before)  # equal if it failed right after a checkpoint
    flip(newest / file)
    refused = shell("train", script, "--resume", newest)
    assert refused.code == 2
    assert f"{newest} is damaged: {file} differs from what was written" in refused.error
    done = shell("train", script, "--resume", run)
    assert done.code == 0, done.err
    assert f"warning: the checkpoint at {newest} is damaged: {file} differs" in done.err
    assert f"Going on from the one before it, {before}." in done.err
    flip(before / file)
    lost = shell("train", script, "--resume", run)
    assert lost.code == 2
    assert f"{newest} is damaged: {file}" in lost.error
    assert "So are the 1 before it" in lost.error


@pytest.mark.parametrize("kind", ["one worker", "a store", "peers"])
def test_a_checkpoint_without_checksums_of_the_version_before_is_resumed_with_a_note(
    shell: Shell, in_scripts: Write, kind: str
) -> None:
    script = in_scripts(SCRIPT)
    checkpoint = failed(shell, script, kind) / "checkpoint"
    for path in (path for path in checkpoint.iterdir() if path.name in ("state.json", "lone.json")):
        path.write_bytes(path.read_bytes().replace(b'"checkpoint": 2', b'"checkpoint": 1'))
        path.write_bytes(path.read_bytes().replace(b'"checkpoint":2', b'"checkpoint":1'))
    (checkpoint / MANIFEST).unlink()
    done = shell("train", script, "--resume", checkpoint.parent)
    assert done.code == 0, done.err
    notes = [event.text for event in read_trace(shell.runs / "latest") if isinstance(event, Note)]
    assert any("has no checksums" in text for text in notes)
    shutil.rmtree(checkpoint)


def test_a_damaged_checkpoint_is_refused_where_the_run_begins_too(shell: Shell, in_scripts: Write) -> None:
    """Whoever starts a run without the command's own look, as torchrun, Ray and Spark do."""
    from paceline.errors import TraceError
    from paceline.store.disk.checkpoint import RunState, read_checkpoint

    run = failed(shell, in_scripts(SCRIPT), "a store")
    flip(run / "checkpoint" / "optimizer.safetensors")
    with pytest.raises(TraceError, match=r"optimizer.safetensors differs"):
        read_checkpoint(run / "checkpoint", "state.json", RunState)
