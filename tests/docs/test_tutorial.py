"""The tutorial is true: its commands run one after another and lead where it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
BIN = Path(sys.executable).parent


def typed(line: str, folder: Path) -> str:
    """What the terminal shows when the line is typed there."""
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def interrupted(line: str, folder: Path) -> str:
    """What the terminal shows when Ctrl-C is pressed as soon as progress is shown."""
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        line.split(), cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    shown = ""
    while "samples/s" not in shown and (more := process.stderr.readline()):
        shown += more
    os.killpg(process.pid, signal.SIGINT)
    shown += process.communicate(timeout=60)[1]
    assert process.returncode != 0, shown
    return shown


def result_of(folder: Path) -> dict[str, object]:
    return msgspec.json.decode((folder / "runs/latest/result.json").read_bytes(), type=dict[str, object])


@pytest.mark.timeout(300)
def test_a_newcomer_gets_from_a_script_to_a_resumed_run(tmp_path: Path) -> None:
    text = TUTORIAL.read_text()
    script = re.search(r"^```python\n# train.py\n(.*?)^```", text, re.M | re.S)
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])
    lines = [
        line for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()
    ]
    two, slow, report, asp, compare, lost, stopped, resumed = lines
    typed("python train.py", tmp_path)
    typed(two, tmp_path)
    typed(slow, tmp_path)
    lockstep = result_of(tmp_path)
    typed(report, tmp_path)
    assert "Who waits for whom" in (tmp_path / "report.html").read_text()
    typed(asp, tmp_path)
    free = result_of(tmp_path)
    assert sum(free["waiting_share"]) < sum(lockstep["waiting_share"]) / 2  # type: ignore[call-overload]
    assert "bsp + balance" in typed(compare, tmp_path)
    assert "rank 2 died" in typed(lost, tmp_path)
    assert result_of(tmp_path)["samples"] == 6 * 3500, "what rank 2 had not finished is done by others"
    assert "paceline train train.py --resume" in interrupted(stopped, tmp_path)
    before = result_of(tmp_path)
    typed(resumed, tmp_path)
    after = result_of(tmp_path)
    assert (before["status"], after["status"]) == ("stopped", "finished")
