"""The benchmark of sequence parallelism refuses figures of something that sends other bytes than it says."""

from __future__ import annotations

import pytest

from paceline.errors import RunError
from paceline_bench.sequence import check_bytes
from paceline_bench.sequence_worker import SequenceTask, WaySeen

TASK = SequenceTask(workers=4, shape=(1, 8, 16, 4), heads=4, layers=2, blocks=1, rounds=1)
ONE = 8 * 16 * 4 * 4 // 16 * 3
"""What a switch sends."""


def test_the_bytes_of_the_formula_pass_and_one_more_does_not() -> None:
    check_bytes("dynamic", TASK, 0, WaySeen([], forward=4 * ONE, backward=4 * ONE))
    with pytest.raises(RunError, match=f"dynamic on worker 3 sent {4 * ONE + 1} bytes forward"):
        check_bytes("dynamic", TASK, 3, WaySeen([], forward=4 * ONE + 1, backward=4 * ONE))
    with pytest.raises(RunError, match=f"formula says {4 * 4 * ONE} and {8 * 4 * ONE}"):
        check_bytes("ring", TASK, 0, WaySeen([], forward=4 * 4 * ONE, backward=4 * ONE))
