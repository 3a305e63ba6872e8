"""One Hypothesis profile for all property tests: the same examples in every run, no time limit each."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "paceline",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("paceline")
