"""`paceline train` and `compare`: what they print, what they leave, how they stop and go on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from paceline.cli.train import find_checkpoint
from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.trace import Result, TraceWriter, read_trace, tally
from paceline.trace.events import Decided, Planned, RunEnded
from support.command import error_lines, run_command, start_command
from support.runs import SCRIPTS, Lab, children, wait_until
from support.shell import Shell
from support.stops import stop_arrived
from support.tensors import assert_equal
from support.traces import started

Write = Callable[[str], Path]
SCRIPT = SCRIPTS / "train.py"
ARGS = ("--", "momentum", "--samples", 32, "--epochs", 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_json_is_one_document_with_every_field_of_the_result(shell: Shell, workers: int) -> None:
    done = shell("train", SCRIPT, "-p", "ssp", "--set", "staleness=2", "-n", workers, "--json", *ARGS)
    assert done.code == 0
    assert set(done.json) == {field.name for field in msgspec.structs.fields(Result)}
    result = msgspec.convert(done.json, Result)
    assert (result.protocol, result.settings, result.workers) == ("ssp", {"staleness": 2}, workers)
    assert (result.status, result.samples, result.simulated) == ("finished", 64, False)
    assert result.accuracy is None, "nobody evaluated, so nobody knows"
    assert result.loss is not None
    assert len(result.waiting_share) == workers
    assert result.updates == 16


def test_a_run_is_a_folder_with_config_trace_result_weights_and_logs(shell: Shell) -> None:
    done = shell("train", SCRIPT, "--seed", 4, "--slow", "1:2", "--device-time", 0.002, "--json", *ARGS)
    folder = shell.runs / "latest"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "trace.jsonl",
        "result.json",
        "weights.safetensors",
        "owner.json",
        "logs",
    }
    processes = ("rank0", "rank1", "store")
    logs = {f"{name}.{kind}" for name in processes for kind in ("log", "stack")}
    assert {path.name for path in (folder / "logs").iterdir()} == logs
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=RunConfig)
    assert (config.seed, config.workers, config.slow, config.device_time_s) == (4, 2, {1: 2.0}, 0.002)
    assert msgspec.json.decode((folder / "result.json").read_bytes()) == done.json
    assert msgspec.to_builtins(tally(read_trace(folder)).result()) == done.json
    assert done.json["emulated"] == {"slow": {"1": 2.0}, "device_time_s": 0.002}
    assert set(load_file(folder / "weights.safetensors")) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_without_json_the_run_folder_is_all_that_goes_to_standard_output(shell: Shell) -> None:
    done = shell("train", SCRIPT, *ARGS)
    assert done.code == 0
    assert Path(done.out.strip()).resolve() == (shell.runs / "latest").resolve()


def test_compare_prints_one_list_with_a_result_per_protocol(shell: Shell) -> None:
    done = shell("compare", SCRIPT, "--protocols", "bsp,ssp:staleness=1,asp", "-n", 2, "--json", *ARGS)
    assert done.code == 0
    assert [(r["protocol"], r["settings"]) for r in done.json] == [
        ("bsp", {}),
        ("ssp", {"staleness": 1}),
        ("asp", {}),
    ]
    assert {r["samples"] for r in done.json} == {64}
    assert (shell.runs / "report.html").is_file()


def test_a_run_that_finished_says_that_there_is_nothing_to_resume(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.jsonl")
    trace.write(started(2))
    trace.write(RunEnded(1.0, "finished"))
    trace.close()
    with pytest.raises(ConfigError, match="finished, so there is nothing to resume"):
        find_checkpoint(tmp_path)


def test_what_was_killed_as_a_whole_goes_on_from_its_last_checkpoint(
    lab: Lab, shell: Shell, tmp_path: Path
) -> None:
    """Every process of a real command at once, in the middle of training."""
    flags, training = ("--protocol", "bsp", "--workers", 2), ("--", "momentum", "--epochs", 6)
    every = ("--checkpoint-every", 4)
    command = start_command("train", SCRIPT, *flags, *every, *training, *lab.pause(12), cwd=tmp_path)
    latest = tmp_path / "runs" / "latest"
    trace = latest / "trace.jsonl"
    wait_until(lambda: trace.exists() and b'"kept"' in trace.read_bytes(), "a checkpoint is on the disk")
    for pid in lab.leftovers() - lab.idle:
        os.kill(pid, signal.SIGKILL)
    command.communicate(timeout=60)
    lab.go_on()
    done = shell("train", SCRIPT, "--resume", latest, "--json")
    assert (done.code, done.json["protocol"], done.json["updates"]) == (0, "bsp", 48)
    weights = load_file(shell.runs / "latest" / "weights.safetensors")
    assert shell("train", SCRIPT, *flags, *training).code == 0
    assert_equal(weights, load_file(shell.runs / "latest" / "weights.safetensors"))


def test_a_run_killed_before_its_first_checkpoint_goes_on_from_the_one_it_began_with(tmp_path: Path) -> None:
    older, newer = tmp_path / "older", tmp_path / "newer"
    (older / "checkpoint").mkdir(parents=True)
    (older / "checkpoint" / "model.safetensors").touch()
    newer.mkdir()
    config = RunConfig(run="newer", folder=str(newer), resume=str(older / "checkpoint"))
    (newer / "config.json").write_bytes(msgspec.json.encode(config))
    assert find_checkpoint(newer) == older / "checkpoint"
    (newer / "weights.safetensors").touch()
    with pytest.raises(ConfigError, match="no checkpoint in"):
        find_checkpoint(newer)  # it has ended, and would be done again


def interrupt_paused(lab: Lab, command: subprocess.Popen[str], how: signal.Signals) -> None:
    """Interrupt a run of two whose workers wait; they go on when nothing can come before the stop."""
    lab.until_paused(2)
    os.kill(command.pid, how)
    [zygote] = children(command.pid)
    wait_until(lambda: stop_arrived(zygote), "the stop has been passed on")
    lab.go_on()


WAITS_UNDER_ASP = """
import os, sys
from cases import CASES
from pause import Pause
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.join()
case = CASES["momentum"]
model, optimizer = case.build()
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(TensorDataset(*case.samples(64))))
pause = Pause(sys.argv[1] if "-asp-" in os.readlink("/proc/self/fd/1") else None, 3)
for x, y in loader:
    pause()
    case.iteration(model, optimizer, x, y)
"""
"""Its output goes to the run's folder, which is named after the protocol."""


@pytest.mark.long
def test_a_comparison_that_is_stopped_shows_what_has_finished(
    lab: Lab, in_scripts: Write, tmp_path: Path
) -> None:
    flags = ("--protocols", "bsp,asp,ssp", "-n", 2, "--json")
    script = in_scripts(WAITS_UNDER_ASP)
    command = start_command("compare", script, *flags, "--", lab.root / "go on", cwd=tmp_path)
    interrupt_paused(lab, command, signal.SIGINT)
    out, _ = command.communicate(timeout=60)
    assert command.returncode == 1
    assert [result["protocol"] for result in msgspec.json.decode(out)] == ["bsp"]
    assert (tmp_path / "runs" / "report.html").is_file()
    wait_until(lambda: lab.leftovers() <= lab.idle, "everything is gone", 20)


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_saves_the_run_and_the_command_it_names_finishes_it(
    lab: Lab, tmp_path: Path, how: signal.Signals
) -> None:
    """Through the real command: a process of its own, with an engine of its own."""
    flags, args = ("--protocol", "bsp", "--workers", 2), ("momentum", "--epochs", 6, *lab.pause(9))
    command = start_command("train", SCRIPT, *flags, "--", *args, cwd=tmp_path)
    interrupt_paused(lab, command, how)
    out, errors = command.communicate(timeout=60)
    assert (command.returncode, out) == (1, "")
    [line] = error_lines(errors)
    stopped = (tmp_path / "runs" / "latest").resolve()
    named = f"Its checkpoint is runs/{stopped.name}/checkpoint. Go on with: paceline train "
    assert line.startswith(f"error: interrupted. {named}")
    _, _, words = line.partition("Go on with: paceline ")
    resumed = run_command(*words.split(), "--json", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    result = msgspec.json.decode(resumed.stdout, type=Result)
    before = tally(read_trace(stopped)).result()
    planned = next(x for x in read_trace(tmp_path / "runs" / "latest") if isinstance(x, Planned))
    assert planned.before == before.samples, "progress counts only what is left to do"
    assert (before.status, result.status) == ("stopped", "finished")
    assert (result.protocol, result.workers) == ("bsp", 2)
    assert before.samples + result.samples == 6 * 64
    assert any(isinstance(event, Decided) for event in read_trace(stopped))
    wait_until(lambda: lab.leftovers() <= lab.idle, "everything is gone", 20)
