"""What a run leaves on disk, when there is no room, when the store is lost, when two begin at once."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.cli.running.common import new_run
from paceline.cli.running.conduct import conduct
from paceline.config import RunConfig
from paceline.engines.control import Ended
from paceline.errors import RunError
from support.command import error_lines


def _little_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_a_file_that_cannot_grow_is_one_error_line_and_no_traceback(tmp_path: Path) -> None:
    command = (
        sys.executable,
        "-m",
        "paceline",
        "simulate",
        "-p",
        "ssp",
        "--workers",
        "8",
        "--runs",
        tmp_path,
    )
    done = subprocess.run(command, preexec_fn=_little_room, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = error_lines(done.stderr)
    assert "File too large" in line
    assert "--runs" in line
    assert "Traceback" not in done.stderr


class LostStore:
    """An engine whose store ends before it has written a line of the trace."""

    def __init__(self, status: int, said: str) -> None:
        self.status, self.said = status, said

    def launch(self, config: RunConfig, secret: str = "") -> None:
        (config.path / "logs").mkdir()
        (config.path / "logs" / "store.log").write_text(self.said)

    def wait(self, timeout_s: float) -> Ended:
        return Ended({}, self.status)

    def stop(self) -> None:
        raise AssertionError("nobody asked for it")


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (
            1,
            "Traceback ...\nOSError: No space left on device\n",
            "with status 1: OSError: No space left on device. ",
        ),
        (-9, "", "by SIGKILL. "),
    ],
)
def test_a_store_that_is_lost_at_once_is_told_with_its_last_words(
    tmp_path: Path, status: int, said: str, told: str
) -> None:
    config = RunConfig(run="r", folder=str(tmp_path), script="train.py", workers=2)
    with pytest.raises(RunError, match=f"the store ended {told}Read .*store.log"):
        conduct(LostStore(status, said), config)


def test_runs_that_begin_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    def begin(number: int) -> Path:
        return new_run(tmp_path, f"run{number}")[1]

    with ThreadPoolExecutor(8) as pool:
        folders: Iterator[Path] = pool.map(begin, range(200))
        made = {folder.name for folder in folders}
    assert {path.name for path in tmp_path.iterdir()} == made | {"latest"}
    assert (tmp_path / "latest").resolve().name in made
