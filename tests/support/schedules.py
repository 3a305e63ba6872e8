"""Random schedules for Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from support.drive import Schedule


def schedules(workers: int = 5, iterations: int = 12, churn: bool = True) -> st.SearchStrategy[Schedule]:
    """Unequal workers with slow phases; with `churn` some die, some join, some come back."""
    ranks = st.integers(0, workers + 1)
    changes = st.lists(st.tuples(st.integers(0, 60), ranks), max_size=6 if churn else 0).map(tuple)
    return st.builds(
        Schedule,
        workers=st.integers(1, workers),
        seed=st.integers(0, 9999),
        speeds=st.lists(st.integers(1, 8), min_size=1, max_size=workers).map(tuple),
        transient=st.sampled_from([0.0, 0.1, 0.4]),
        iterations=st.integers(1, iterations),
        deaths=changes,
        joins=changes,
    )
