"""Series over time stay bounded and lose nothing."""

from __future__ import annotations

import pytest

from paceline.view.report.series import TimeBins, thin


def test_rates_are_right_however_often_bins_were_joined() -> None:
    bins = TimeBins(bins=16)
    for step in range(1, 10_001):
        bins.spread((step - 1) / 100, step / 100, 5.0)
    rates = bins.rates(100.0)
    assert 4 <= len(rates) <= 16
    assert [rate for _, rate in rates] == pytest.approx([500.0] * len(rates))


def test_means_are_the_means_of_what_was_added() -> None:
    bins = TimeBins(bins=8)
    for step in range(1000):
        bins.add(step / 10, 2.0 if step % 2 else 4.0)
    points = bins.means()
    assert len(points) <= 8
    assert [value for _, value in points] == pytest.approx([3.0] * len(points), abs=0.05)


def test_thinning_keeps_the_last() -> None:
    assert thin(list(range(10)), 20) == list(range(10))
    kept = thin(list(range(1000)), 50)
    assert len(kept) <= 51
    assert kept[-1] == 999
