"""A command that shows one view, or starts workers elsewhere, does not pay for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    ["view.terminal.progress", "view.terminal.table", "view.report.report", "engines.local", "engines.ray"],
)
def test_a_view_or_engine_does_not_import_torch(module: str) -> None:
    code = f"import sys, paceline.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
