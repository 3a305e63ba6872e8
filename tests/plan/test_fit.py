"""The line through measured times: every size counts in proportion, so that small ones tell the latency."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.profile.model import fit

SIZES = (4 * 1024, 64 * 1024, 1 << 20, 4 << 20, 16 << 20)


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7))
def test_a_line_without_noise_is_found(latency: float, per_byte: float) -> None:
    found = fit(SIZES, [latency + per_byte * size for size in SIZES])
    assert found == (pytest.approx(latency, rel=1e-6), pytest.approx(per_byte, rel=1e-6))


@pytest.mark.parametrize("off", [0.8, 0.9, 1.1, 1.25])
def test_an_error_of_the_largest_size_does_not_change_the_latency(off: float) -> None:
    latency, per_byte = 2e-4, 1e-9
    times = [latency + per_byte * size for size in SIZES]
    times[-1] *= off
    assert fit(SIZES, times)[0] == pytest.approx(latency, rel=0.05)


def test_neither_part_is_below_zero() -> None:
    assert fit((1, 2, 4), (3.0, 2.0, 1.0))[1] == 0.0
    assert fit((1, 2, 4), (1.0, 3.0, 8.0))[0] == 0.0
    assert fit((1, 2), (0.0, 0.0)) == (0.0, 0.0)
    assert fit((4, 4), (2.0, 2.0)) == (0.0, 0.5)
    assert fit((1, 2, 4), (0.0, 0.0, 4.0))[1] > 0
