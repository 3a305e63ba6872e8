"""A grid of workers: where ranks stand, and which meshes fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.protocols.grid import AXES, Grid, check_workers, parse_mesh

sizes = st.dictionaries(st.sampled_from(AXES), st.integers(1, 4), min_size=1, max_size=4)


@given(sizes)
def test_ranks_count_through_the_last_axis_first_as_a_device_mesh_does(axes: dict[str, int]) -> None:
    grid = Grid(axes)
    places = np.arange(grid.count).reshape(tuple(axes.values()))
    for rank in range(grid.count):
        place = grid.place(rank)
        assert places[tuple(place.values())] == rank == grid.rank_at(place)


@given(sizes, st.data())
def test_a_line_along_an_axis_has_every_rank_that_differs_in_that_axis_alone(
    axes: dict[str, int], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, Grid(axes).count - 1))
    grid = Grid(axes, rank)
    for axis, size in axes.items():
        line = grid.ranks(axis)
        assert len(line) == size
        assert line[grid.index(axis)] == rank
        others = {name for name in axes if name != axis}
        assert all(grid.place(r)[name] == grid.place(rank)[name] for r in line for name in others)


def test_a_mesh_that_does_not_fit_says_which_numbers_do() -> None:
    with pytest.raises(
        ConfigError, match=r"has 8 places, but there are 6 workers. Use --workers 8, or --mesh "
    ):
        check_workers({"data": 2, "stage": 4}, 6)
    with pytest.raises(ConfigError, match=r"data=2,stage=3\.$"):
        check_workers({"data": 2, "stage": 4}, 6)
    with pytest.raises(ConfigError, match="6 places"):
        RunConfig(run="", folder="", workers=8, mesh={"data": 2, "stage": 3})


@pytest.mark.parametrize("text", ["data", "data=x", "data=0", "stages=4", "", "data=2,data=2", "data=-1"])
def test_a_mesh_that_cannot_be_read_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_mesh(text)


@pytest.mark.parametrize(
    "dial",
    [
        {"listen": "127.0.0.1:0"},
        {"fabric": "gloo"},
        {"balance": True},
        {"compress": "fp16"},
    ],
)
def test_dials_that_a_mesh_does_not_have_are_refused(dial: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="does not go with --mesh"):
        RunConfig(run="", folder="", workers=4, mesh={"stage": 4}, **dial)  # type: ignore[arg-type]
