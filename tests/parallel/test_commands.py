"""The commands on a mesh: what they print, refuse and leave, and torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from paceline.parallel.registry import PIPELINES
from paceline.trace import Result
from support.runs import SCRIPTS, Lab
from support.shell import Shell

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"^epoch \d+: accuracy ([\d.]+)", text, re.M)]


def test_the_example_prints_what_stands_beside_it(shell: Shell) -> None:
    expected = accuracies((EXAMPLES / "pipeline_digits.out").read_text())[:3]
    done = shell("train", EXAMPLES / "pipeline_digits.py", "--mesh", "stage=4")
    assert done.code == 0, done.err
    found = accuracies((shell.runs / "latest" / "logs" / "rank0.log").read_text())
    assert len(found) == 3
    assert abs(found[-1] - expected[-1]) < 0.05  # other processors round otherwise
    page = shell.runs / "report.html"
    assert shell("report", shell.runs / "latest", "--out", page).code == 0
    assert "stage 3" in page.read_text()
    assert "along stage" in page.read_text()


@pytest.mark.long
def test_alone_the_example_trains_unsplit() -> None:
    command = [sys.executable, EXAMPLES / "pipeline_digits.py", "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert abs(accuracies(done.stdout)[0] - 0.794) < 0.05


def test_the_third_family_is_listed_with_promise_and_paper(shell: Shell) -> None:
    listed = {each["name"]: each for each in shell("protocols", "--json").json}
    for name in PIPELINES:
        assert listed[name]["family"] == "split"
        assert listed[name]["promise"]
        assert listed[name]["paper"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("--workers", 6, "--mesh", "data=2,stage=4"),
            "8 places, but there are 6 workers. Use --workers 8, or",
        ),
        (("--mesh", "stages=4"), "unknown axis 'stages'"),
        (("--mesh", "stage=3", "-p", "layerwise", "--set", "p=1,1,0", "--set", "m=2,2,0"), "= -1 is < 0"),
        (("--mesh", "stage=3", "-p", "layerwise", "--set", "p=1,0", "--set", "m=2,0"), "but the mesh has 3"),
        (("--mesh", "stage=2", "-p", "ssp"), "splits no model"),
        (("--mesh", "stage=2", "-p", "layerwize"), "Did you mean 'layerwise'?"),
        (("-p", "row_splt"), "Did you mean 'row_split'?"),
        (("--mesh", "stage=2", "-p", "fdg", "--set", "data=ad_psgd"), "not for an axis of a mesh"),
        (("--mesh", "stage=2", "--fabric", "gloo"), "does not go with --mesh"),
        (("-p", "fdg", "--set", "shrink=2"), "factor in (0, 1]"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_started(
    shell: Shell, args: tuple[object, ...], said: str
) -> None:
    done = shell("train", SCRIPTS / "pipe.py", *args)
    assert done.code == 2
    assert said in done.error
    assert not list(shell.runs.glob("*/logs"))


def test_the_command_resumes_a_mesh_with_its_protocol_and_with_other_stages(lab: Lab, shell: Shell) -> None:
    running = lab.start("pipe.py", *lab.pause(5), workers=4, mesh={"stage": 4}, protocol="fdg")
    lab.until_paused(4)
    running.stop()
    lab.go_on()
    stopped = lab.finish(running)
    (stopped.folder / "config.json").write_bytes(msgspec.json.encode(running.config))
    left = 96 - stopped.result.samples
    assert left > 0
    for typed, mesh in (((), {"stage": 4}), (("--mesh", "stage=2"), {"stage": 2})):
        done = shell(
            "train", SCRIPTS / "pipe.py", "--resume", stopped.folder, *typed, "--json", "--", "--epochs", 2
        )
        assert done.code == 0, done.err
        found = done.json
        assert (found["protocol"], found["mesh"], found["samples"]) == ("fdg", mesh, left)


def test_pipelines_are_simulated_to_hundreds_of_workers_with_stragglers(shell: Shell) -> None:
    args = ("--mesh", "data=4,stage=64", "--iterations", 20, "--slow", "7:3", "--json")
    done = shell("simulate", "--protocol", "layerwise", *args)
    assert done.code == 0, done.err
    assert done.json["workers"] == 256
    assert done.json["updates"] == 20
    assert done.json["samples"] == 80
    assert done.json["mesh"] == {"data": 4, "stage": 64}


@pytest.mark.long
def test_workers_that_torchrun_started_form_a_mesh(tmp_path: Path) -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (
        *launch,
        "-m",
        "paceline",
        "train",
        SCRIPTS / "pipe.py",
        "--protocol",
        "fr",
        "--",
        "--epochs",
        "1",
    )
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    result = msgspec.json.decode((tmp_path / "runs" / "latest" / "result.json").read_bytes(), type=Result)
    assert (result.status, result.samples, result.mesh) == ("finished", 48, {"stage": 2})
    assert result.staleness is not None
    assert result.staleness.max == 1


@pytest.mark.long
def test_of_workers_that_torchrun_started_only_the_one_that_failed_says_so(tmp_path: Path) -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    command = (*launch, "-m", "paceline", "train", SCRIPTS / "pipe.py", "-p", "fdg", "--", "--fault", "tuple")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1
    said = done.stderr.partition("ChildFailedError")[0]  # from here on torchrun speaks
    assert said.count("error: rank 1: block '1' (LSTM) returned a tuple") == 1
    assert "gloo" not in said
    assert "Aborted" not in said
