"""The script that breaks code on purpose: what it may change, and that it says truly what was noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTICES_ALL = """
from paceline.protocols.rules.dropping import told

def test_words():
    assert told(None, "bsp", True) == told(None, "bsp", False) == ""
    assert "changes nothing" in told(3, "bsp", True)
    assert "are dropped" in told(3, "asp", False)
"""
ONLY_CALLS = """
from paceline.protocols.rules.dropping import told

def test_nothing():
    told(3, "asp", False)
"""
FAILS = """
def test_fails():
    assert False
"""


def mutate(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts/mutate", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_all_of_compression_may_be_changed_and_rules_are_not_hidden_by_equal_names() -> None:
    named = mutate("--list").stdout.split()
    assert {"dssp", "compression", "codecs", "wire_form", "unpack", "parameters", "dana"} <= set(named)


@pytest.mark.parametrize(
    ("tests", "status", "said"),
    [
        (NOTICES_ALL, 0, "3 of 3 mutants noticed"),
        (ONLY_CALLS, 1, "survived: src/paceline/protocols/rules/dropping.py:10 condition of if negated"),
        (FAILS, 2, "fail without any change: "),
    ],
    ids=["all", "none", "failing"],
)
def test_exit_status_says_whether_all_were_noticed(
    tmp_path: Path, tests: str, status: int, said: str
) -> None:
    (file := tmp_path / "test_dropping_only.py").write_text(tests)
    done = mutate("dropping", "--tests", file)
    assert said in done.stdout + done.stderr
    assert done.returncode == status


def test_without_time_for_one_mutant_nothing_is_said_to_be_noticed(tmp_path: Path) -> None:
    (file := tmp_path / "test_dropping_only.py").write_text(NOTICES_ALL)
    done = mutate("dropping", "--tests", file, "--minutes", 0)
    assert (done.returncode, "no mutant was tried" in done.stderr) == (2, True), done.stdout + done.stderr


def test_an_unknown_module_is_refused() -> None:
    done = mutate("dsssp")
    assert (done.returncode, "no module dsssp" in done.stderr) == (2, True)
