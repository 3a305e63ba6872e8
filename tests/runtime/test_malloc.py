"""Workers keep the memory that they free, unless the user has chosen otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from paceline.runtime.worker.malloc import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [bytearray(20 << 20) for _ in range(3)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
plain, kept = faults(), keep_freed_memory()
faults()
print(kept, plain, faults())
"""


def told(**variables: str) -> list[str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=own | variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="another C library")  # type: ignore[operator]
def test_pages_that_were_freed_are_not_asked_for_again() -> None:
    kept, before, after = told()
    assert kept == "True"
    assert int(after) < int(before) / 10


def test_whoever_has_chosen_by_the_environment_is_left_alone() -> None:
    assert told(MALLOC_ARENA_MAX="4")[0] == "False"
