"""The local engine itself: one zygote, many runs, and unusual places to start from."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.engines.local import LocalEngine
from support.command import COMMAND
from support.runs import SCRIPTS, Lab, Run, children

NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]


def may_make_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_make_namespaces(), reason="needs the right to make a process namespace")
def test_the_first_process_of_a_container_can_train(tmp_path: Path) -> None:
    """Its children's parent is process 1, which elsewhere means that the parent has died."""
    command = [*NAMESPACE, str(COMMAND), "train", str(SCRIPTS / "train.py"), "--json", "--", "momentum"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert '"status": "finished"' in done.stdout


def test_one_engine_starts_runs_one_after_another_without_a_trace_of_the_last(lab: Lab) -> None:
    zygote, fds = lab.engine._process.pid, set()
    for workers in (3, 1, 2):
        lab.trained("train.py", "momentum", workers=workers)
        assert children(zygote) == []
        fds.add(len(list(Path(f"/proc/{zygote}/fd").iterdir())))
    assert lab.engine._process.pid == zygote
    assert len(fds) == 1, "descriptors are left open"


@pytest.mark.long
def test_engines_do_not_disturb_each_other_and_a_closed_one_takes_its_run_with_it(lab: Lab) -> None:
    with LocalEngine() as other:
        configs = [lab.config("train.py", "momentum", workers=2, protocol="bsp") for _ in range(2)]
        engines = [lab.engine, other]
        for engine, config in zip(engines, configs, strict=True):
            engine.launch(config)
        for engine, config in zip(engines, configs, strict=True):
            ended = engine.wait(60)
            assert ended is not None
            assert Run(config, ended).result.status == "finished"
        other.launch(lab.config("train.py", "momentum", "--epochs", 100_000, workers=2))
        assert other.wait(0.2) is None
        assert len(lab.leftovers() - lab.idle) >= 4  # zygote, store and two workers
    lab.settle()
