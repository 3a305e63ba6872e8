"""One team of processes per file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.lines import Lines, lines


@pytest.fixture(scope="module")
def line() -> Iterator[Lines]:
    with lines() as started:
        yield started
