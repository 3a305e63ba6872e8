"""Property tests here share one Hypothesis profile."""

from support import hypothesis_profile  # noqa: F401
