"""A disk that fills up while a run goes on costs it lines of its trace, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from paceline.trace import read_trace
from paceline.trace.events import Decided, Gap, RunEnded
from support.disks import small_disk
from support.shell import Outcome, Shell

Write = Callable[[str], Path]
SIZE_BYTES = 6 << 20
SAMPLES, BATCH = 400, 4
SCRIPT = """
import os, time
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from cases import CASES
import paceline

DISK, WHAT = Path({disk!r}), {what!r}


def fill():
    with open(DISK / "filler", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                pass


pace = paceline.join()
case = CASES["momentum"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples({samples})), batch_size={batch})
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for number, (x, y) in enumerate(loader):
    if number == 5 and WHAT and WHAT != "late" and pace.rank == 0:
        time.sleep(0.2)
        fill()
    if number == 35 and WHAT == "late" and pace.rank == 0:
        time.sleep(0.2)
        fill()
    if number == 30 and WHAT == "room again" and pace.rank == 0:
        time.sleep(1.2)
        (DISK / "filler").unlink()
        time.sleep(0.2)
    print("iteration", number, "x" * 500)
    time.sleep(0.004)
    case.iteration(model, optimizer, x, y)
    if number == 40 and WHAT == "fails":
        raise ValueError("no more")
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small one of its own."""
    with small_disk(tmp_path / "disk", SIZE_BYTES) as folder:
        yield folder


def train(shell: Shell, write: Write, disk: Path, what: str, *flags: object) -> tuple[Outcome, Path]:
    script = write(SCRIPT.format(disk=str(disk), what=what, samples=SAMPLES, batch=BATCH))
    done = shell("train", script, "--runs", disk / "runs", *flags)
    return done, (disk / "runs" / "latest").resolve()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("what", ["full", "room again"])
def test_a_run_finishes_on_a_full_disk_and_its_result_counts_everything(
    shell: Shell, in_scripts: Write, disk: Path, workers: int, what: str
) -> None:
    done, run = train(shell, in_scripts, disk, what, "--workers", workers, "--protocol", "bsp")
    assert done.code == 0, done.err
    assert "no room is left" in done.err
    result = msgspec.json.decode((run / "result.json").read_bytes())
    assert (result["status"], result["samples"]) == ("finished", SAMPLES)
    assert result["updates"] * BATCH * workers == SAMPLES
    trace = list(read_trace(run))
    gap, *_ = (event for event in trace if isinstance(event, Gap))  # a short line may fit in between
    decided = [event.pushed for event in trace if isinstance(event, Decided)]
    assert gap.events > 0
    assert len(decided) < SAMPLES // BATCH
    assert "No space left" in gap.why
    assert f"warning: {gap.events} events from" in done.err
    assert isinstance(trace[-1], RunEnded)
    assert (run / "weights.safetensors").stat().st_size > 0
    assert not list(run.rglob("*partial*"))
    if what == "room again":
        assert sum(isinstance(event, Decided) for event in trace[trace.index(gap) :]) > 20 // workers


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_fails_on_a_full_disk_leaves_a_checkpoint_to_go_on_from(
    shell: Shell, in_scripts: Write, disk: Path, workers: int
) -> None:
    flags = ("--workers", workers, "--protocol", "bsp", "--on-failure", "stop")
    done, run = train(shell, in_scripts, disk, "fails", *flags)
    assert done.code == 1
    assert "ValueError: no more" in done.error
    assert msgspec.json.decode((run / "result.json").read_bytes())["status"] == "failed"
    assert not list(run.rglob("*partial*"))
    (disk / "filler").unlink()
    script = in_scripts(SCRIPT.format(disk=str(disk), what="", samples=SAMPLES, batch=BATCH))
    again = shell("train", script, "--runs", disk / "runs", "--resume", run, "--json")
    assert again.code == 0, again.err
    before = msgspec.json.decode((run / "result.json").read_bytes())["samples"]
    assert again.json["samples"] == SAMPLES - before


@pytest.mark.parametrize("workers", [1, 2])
def test_weights_are_worth_more_than_an_old_checkpoint(
    shell: Shell, in_scripts: Write, tmp_path: Path, workers: int
) -> None:
    """On a disk with so little room that none can be kept for the end."""
    with small_disk(tmp_path / "tiny", 1 << 20) as disk:
        flags = ("--workers", workers, "--protocol", "bsp", "--checkpoint-every", 10)
        done, run = train(shell, in_scripts, disk, "late", *flags)
        assert done.code == 0, done.err
        assert "the checkpoint checkpoint.previous was removed to make some" in " ".join(done.err.split())
        result = msgspec.json.decode((run / "result.json").read_bytes())
        assert (result["status"], result["samples"]) == ("finished", SAMPLES)
        assert load_file(run / "weights.safetensors")


def test_a_bounded_trace_stays_short_and_the_result_is_the_same(shell: Shell, in_scripts: Write) -> None:
    script = in_scripts(SCRIPT.format(disk="/nowhere", what="", samples=SAMPLES, batch=BATCH))
    done = shell("train", script, "--protocol", "ssp", "--trace-limit", "5KB", "--json")
    assert done.code == 0, done.err
    run = shell.runs / "latest"
    assert (run / "trace.jsonl").stat().st_size < 8000
    assert (done.json["samples"], done.json["updates"]) == (SAMPLES, SAMPLES // BATCH)
    refused = shell("replay", run, "--runs", shell.runs)
    assert refused.code == 2
    assert "(the limit of the trace), so it cannot be replayed beyond that" in refused.error
    assert "or record a run with --trace-limit none" in refused.error


def test_a_trace_is_bounded_unless_it_is_told_otherwise() -> None:
    from paceline.config import RunConfig

    assert RunConfig(run="r", folder="f").trace_limit_bytes == 256 * 10**6
    assert RunConfig(run="r", folder="f", trace_limit="none").trace_limit_bytes is None


@pytest.mark.parametrize("limit", ["5", "5TB", "MB", "-1MB"])
def test_what_is_no_size_is_refused(limit: str) -> None:
    from paceline.config import RunConfig

    with pytest.raises(ValueError, match=r"takes a size such as 50MB"):
        RunConfig(run="r", folder="f", trace_limit=limit)
