"""A worker's own rows: all of them in every pass, by however many processes they are loaded."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
from torch.utils.data import DataLoader

from paceline.errors import ConfigError
from paceline.runtime.worker.data.partition import Partition
from paceline.runtime.worker.data.rows import spooled


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("processes", [0, 2])
def test_every_row_comes_once_per_pass(shuffle: bool, processes: int) -> None:
    rows = [{"id": n} for n in range(50)]
    with spooled(rows) as fd:
        assert fd is not None
        loader = DataLoader(Partition(fd, shuffle), batch_size=None, num_workers=processes)
        passes = [[row["id"] for row in loader] for _ in range(2)]
    assert [sorted(each) for each in passes] == [list(range(50))] * 2
    assert (passes[0] == passes[1]) == (not shuffle)


def test_rows_arrive_as_they_were() -> None:
    now = datetime(2024, 5, 6, tzinfo=UTC)
    rows = [{"a": 1, "b": [0.5, None], "c": b"\x00\xff", "d": "ü", "at": now}, [1, 2], 7]
    with spooled(rows) as fd:
        assert fd is not None
        assert list(Partition(fd)) == rows


def test_vectors_and_arrays_arrive_as_lists() -> None:
    with spooled([{"x": np.arange(3.0)}]) as fd:
        assert fd is not None
        assert list(Partition(fd)) == [{"x": [0.0, 1.0, 2.0]}]


def test_a_value_without_a_plain_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="a row holds a object"), spooled([{"x": object()}]):
        pass


def test_no_rows_at_all_is_an_empty_partition() -> None:
    with spooled([]) as fd:
        assert fd is not None
        assert len(Partition(fd)) == 0
        assert list(Partition(fd)) == []


def test_a_worker_without_rows_says_how_to_get_them() -> None:
    import paceline.runtime.lone.solo as solo

    with pytest.raises(ConfigError, match="train_on"):
        solo.Solo().partition()
