"""The page of the papers' claims is what its script makes of the newest record."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import papers_page  # noqa: E402


def test_the_page_is_what_the_newest_record_gives() -> None:
    assert papers_page.page(papers_page.newest()) == papers_page.PAGE.read_text()
