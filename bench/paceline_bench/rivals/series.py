"""The runs of the comparison: everybody to an accuracy, then everybody with a worker killed.

Everybody tries the same learning rates with the first seed, and runs the others with its best. A worker is
killed with that one too, where both scenes train the same. Who cannot run has an outcome with the reason.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline_bench.cluster.scene import Scene
from paceline_bench.cluster.series import Series
from paceline_bench.rivals.roster import Side


class Contest(NamedTuple):
    """Two series of the same sides."""

    trained: Series[Side]
    killed: Series[Side]


def contest(
    scenes: tuple[Scene, Scene],
    sides: list[Side],
    rates: tuple[float, ...],
    seeds: tuple[int, ...],
    version: str,
) -> Contest:
    """Of these sides, in these scenes; rates of one task say nothing of another."""
    first, second = scenes
    trained = Series(first, sides, rates, seeds, False, version)
    after = trained if first.task == second.task else None
    return Contest(trained, Series(second, sides, (), seeds, False, version, after))
