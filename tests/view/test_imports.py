"""A command that shows one view does not pay for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("view", ["terminal.progress", "terminal.table", "report.report"])
def test_a_view_does_not_import_torch(view: str) -> None:
    code = f"import sys, paceline.view.{view}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
