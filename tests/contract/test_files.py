"""What every protocol's file says and imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline.protocols
from paceline.protocols import PACED, Pacing
from paceline.protocols.settings import about, make, resolved

FILES = sorted(Path(paceline.protocols.__file__).parent.rglob("*.py"))
FORBIDDEN = {"torch", "socket", "threading", "multiprocessing", "asyncio", "time", "subprocess"}
every_name = pytest.mark.parametrize("name", sorted(PACED))


@every_name
def test_says_what_it_is_where_it_comes_from_and_what_it_promises(name: str) -> None:
    told = about(name)
    assert told.name == name
    assert told.family == "paced"
    assert told.title.endswith(".")
    assert len(told.paper) > 20
    assert told.promise.endswith(".")
    assert told.when.endswith(".")


@every_name
def test_every_setting_has_help_and_its_default(name: str) -> None:
    told, default = about(name), resolved(make(name))
    assert {setting.name: setting.default for setting in told.settings} == default
    for setting in told.settings:
        assert setting.help.endswith("."), f"{name}.{setting.name} has no docstring below it"
        assert setting.type


@every_name
def test_its_defaults_are_a_pacing_rule(name: str) -> None:
    assert isinstance(make(name), Pacing)
    assert isinstance(PACED[name].lockstep, bool)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_protocols_import_neither_torch_nor_anything_that_acts(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & FORBIDDEN


def test_importing_all_protocols_loads_neither_torch_nor_sockets() -> None:
    code = "import sys, paceline.protocols.settings; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "socket", "numpy"} & set(done.stdout.split())
