"""Scripts whose names are those of Python's own modules, in the folder that the command is started in."""

from __future__ import annotations

from pathlib import Path

from support.command import run_command

SCRIPT = """
import beside
import missing_module
"""


def test_a_script_named_as_a_module_of_python_fails_with_its_own_error(tmp_path: Path) -> None:
    """Nothing but a worker imports it: neither the command nor the process that starts workers."""
    (tmp_path / "beside.py").touch()
    (tmp_path / "random.py").write_text(SCRIPT)
    done = run_command("train", "random.py", "--protocol", "asp", "--workers", 2, cwd=tmp_path)
    assert done.returncode == 1
    assert "No module named 'missing_module' (before training began)" in done.stderr
    assert "that starts workers" not in done.stderr
