"""The picture in README is small, and its script says what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import report_picture  # noqa: E402


def test_the_picture_is_a_png_small_enough_for_a_readme() -> None:
    data = report_picture.PICTURE.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) <= report_picture.MOST_BYTES


def test_without_chromium_one_sentence_says_what_to_install() -> None:
    script = ROOT / "scripts" / "report_picture.py"
    done = subprocess.run(
        [sys.executable, script], env={"PATH": ""}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no Chromium here")
    assert "apt-get install chromium" in done.stderr


def test_a_browser_that_draws_nothing_is_an_error(tmp_path: Path) -> None:
    report, picture = tmp_path / "report.html", tmp_path / "report.png"
    report.write_text("<p>a report</p>")
    with pytest.raises(SystemExit, match="drew nothing"):
        report_picture.draw("true", report, picture, 100, 100)
