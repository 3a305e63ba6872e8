"""The picture of the papers' claims: one line per judged figure, drawn where its value and its rule are."""

from __future__ import annotations

import re
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_bench.harness.record import BenchRow
from paceline_bench.papers.papers import TRIED, plots_of_papers
from paceline_bench.papers.plot import SCALES, Scale, picture
from paceline_bench.papers.recipe import NEVER, Recipe, close, gains, shown_only, up_to

RATIOS, POINTS, OTHERS = SCALES


def recipe(*figures: object) -> dict[str, Recipe]:
    words = dict.fromkeys(("paper", "claim", "source", "setup", "how", "explained"), "said")
    return {"made": Recipe(name="made", figures=figures, evidence="measured", **words)}  # type: ignore[arg-type]


def row(claimed: str, value: float | None, figure: str = "ratio", **case: str) -> BenchRow:
    said = {"recipe": "made", "claimed": claimed, "published": "", "verdict": "reproduced"} | case
    return BenchRow(case=said, measured={}, figure=figure, value=value)  # type: ignore[arg-type]


def dots(drawn: str) -> list[float]:
    return [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', drawn)]


def test_a_line_for_every_judged_figure_and_none_for_what_is_only_shown() -> None:
    recipes = recipe(close("a", 2.0), gains("b", 3.0), shown_only("c"))
    drawn = picture([row("a", 1.9), row("b", 2.0, "points"), row("c", 5.0), row("a", None)], recipes)
    assert len(dots(drawn)) == 2
    assert ("made: a" in drawn, "made: b" in drawn, "made: c" in drawn) == (True, True, False)


def test_without_a_judged_figure_there_is_no_picture() -> None:
    assert picture([row("c", 5.0)], recipe(shown_only("c"))) == ""
    assert plots_of_papers([row("not tried", None)]) == {}


@pytest.mark.parametrize("scale", SCALES)
@given(one=st.floats(-100, 1000), other=st.floats(-100, 1000))
def test_more_is_never_further_left(scale: Scale, one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    assert 0 <= scale.part(low) <= scale.part(high) <= 1
    assert (scale.part(-inf), scale.part(inf)) == (0, 1)


def test_the_line_over_seeds_and_the_bands_are_where_they_are_said_to_be() -> None:
    drawn = picture([row("a", 1.0, **{"over seeds": "0.30x to 10.00x, 5"})], recipe(close("a", 2.0)))
    low, high = (380 + 420 * RATIOS.part(value) for value in (0.3, 10.0))
    assert f'd="M{low:.1f}' in drawn
    assert f'H{high:.1f}"' in drawn
    assert f'x="{380 + 420 * RATIOS.part(1.85):.1f}"' in drawn


def test_what_was_never_reached_is_drawn_at_the_end_and_says_so() -> None:
    never = row("a", None, **{"over seeds": "2.00x to never, 3"})
    never = msgspec.structs.replace(never, remark=NEVER)
    drawn = picture([never], recipe(up_to("a", 2.0, inputs="paper's")))
    assert dots(drawn) == [380 + 420]
    assert NEVER in drawn
    assert f'd="M{380 + 420 * RATIOS.part(2.0):.1f}' in drawn


def test_shares_are_drawn_over_the_published_ones() -> None:
    recipes = recipe(close("a", 0.5, "share"))
    (at,) = dots(picture([row("a", 0.25, "share")], recipes))
    assert at == pytest.approx(380 + 420 * OTHERS.part(0.5), abs=0.1)


def test_every_recipe_has_a_place_in_the_picture() -> None:
    units = {unit for scale in SCALES for unit in scale.units}
    judged = [figure for recipe in TRIED.values() for figure in recipe.figures if figure.reproduced]
    assert {figure.unit for figure in judged} <= units
