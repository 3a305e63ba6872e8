"""What PSP's theory promises: how far noisy updates are displaced from the sequential ones, at most.

Paper: Wang, Catterall, Mortier, "Probabilistic Synchronous Parallel", arXiv 1709.07772, 2017.

`pass_chance` is the paper's a = F(r)^beta: that none of the `sample` peers looked at lags more than
the staleness r, where F(r) is the share of workers that do not. A handful of samples brings both
bounds near to what they are with all workers, however many there are.
"""

from __future__ import annotations


def mean_displacement(pass_chance: float, sample: int, staleness: int, updates: int) -> float:
    """Upper bound of the mean of gamma_t, an update's displacement, over all updates."""
    a, r = pass_chance, staleness
    return _scale(a, sample, r, updates) * (r * (r + 1) / 2 + a * (r + 2) / (1 - a) ** 2)


def mean_squared_displacement(pass_chance: float, sample: int, staleness: int, updates: int) -> float:
    """Upper bound of the mean of gamma_t squared."""
    a, r = pass_chance, staleness
    return _scale(a, sample, r, updates) * (r * (r + 1) * (2 * r + 1) / 6 + a * (r * r + 4) / (1 - a) ** 3)


def _scale(a: float, sample: int, staleness: int, updates: int) -> float:
    """The paper's S, which makes the distribution of lags sum to 1."""
    share: float = a ** (1 / sample)
    return (1 - a) / (share * (1 - a) + a - a ** (updates - staleness + 1))
