"""Benchmarks start their sides from a server of processes; it must not outlive them into other tests."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_server_is_left() -> Iterator[None]:
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()
