"""One Hypothesis profile for all property tests: the same examples in every run, no time limit each."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SOME, MANY = 8, 25
"""Examples of a property that names no number: by default, and when every case is asked for."""


def load(every_case: bool) -> None:
    """Must be called before tests are collected: a test keeps the profile it was defined under."""
    settings.register_profile(
        "paceline",
        deadline=None,
        derandomize=True,
        max_examples=MANY if every_case else SOME,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("paceline")
