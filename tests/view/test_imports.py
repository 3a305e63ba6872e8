"""A command that shows one view does not pay for the others, and none of them for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import paceline.view


def test_views_do_not_import_torch() -> None:
    names = ", ".join(paceline.view.__all__)
    code = f"import sys; from paceline.view import {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_does_not_import_rich() -> None:
    code = "import sys; import paceline.view; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = paceline.view.nonsense
