"""The check itself: a test that hangs ends, at its second try as well, wherever the check was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
HANGS = """
import signal, time
import pytest

@pytest.mark.timeout(1)
def test_hangs():
    time.sleep(100)

def test_commands_can_be_interrupted():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_every_try_of_a_test_has_a_time_limit_also_in_the_background(tmp_path: Path) -> None:
    """In the background, as `sh -c 'make test &'` or nohup start it: with Ctrl-C ignored."""
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--reruns", "1", "-q", str(tmp_path)]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert "1 failed, 1 passed, 1 rerun" in done.stdout, done.stdout + done.stderr
