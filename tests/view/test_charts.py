"""Labels beside curves can be read, however near to each other the curves end."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.view.report.charts import LABEL_STEP, spread


@pytest.mark.parametrize(
    "wanted",
    [[50.0], [50.0, 50.0, 50.0], [100.0, 100.0, 100.0], [0.0, 1.0, 99.0, 100.0], [10.0, 40.0, 80.0]],
)
def test_labels_keep_apart_and_within_the_chart(wanted: list[float]) -> None:
    heights = spread(wanted, 0.0, 100.0)
    assert all(below - above >= LABEL_STEP for above, below in pairwise(heights))
    assert min(heights) >= 0
    assert max(heights) <= 100


def test_labels_with_room_stand_where_their_curves_end() -> None:
    assert spread([10.0, 40.0, 80.0], 0.0, 100.0) == [10.0, 40.0, 80.0]
