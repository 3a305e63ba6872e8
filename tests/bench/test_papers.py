"""Verdicts follow the rules of their recipes, results are kept, and every recipe runs in its quick form."""

from __future__ import annotations

import inspect
import re
from math import inf
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline import __version__
from paceline.errors import ConfigError
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.run import BENCHMARKS, apart, chosen
from paceline_bench.kept import keep
from paceline_bench.papers import papers as bench
from paceline_bench.papers import recipe as rules
from paceline_bench.papers.measured import gain
from paceline_bench.papers.papers import NOT_TRIED, OPEN, TRIED, judged_again, papers
from paceline_bench.papers.recipe import (
    BEYOND,
    NEVER,
    Figure,
    Recipe,
    Values,
    at_most,
    between,
    beyond,
    close,
    exact,
    level,
    shown_only,
    up_to,
)
from paceline_bench.papers.training import TrialTrainer
from paceline_bench.papers.trial import Course, Courses, Side, Trial, TrialRun

VALUES = st.floats(0, 1000) | st.just(inf)


def silent(text: str) -> None:
    pass


def test_every_recipe_runs_in_its_quick_form_and_gives_the_figures_of_its_rule(
    request: pytest.FixtureRequest,
) -> None:
    """`make test` tries every third one."""
    some = [*TRIED] if request.config.getoption("--every-case") else [*TRIED][::3]
    rows = papers(BenchPlan(quick=True, recipes=(*some, *OPEN)), silent)
    claimed = [(row.case["recipe"], row.case["claimed"]) for row in rows if row.case["how"] != NOT_TRIED]
    assert claimed == [(name, figure.name) for name in some for figure in TRIED[name].figures]
    assert {row.case["recipe"] for row in rows if row.case["how"] == NOT_TRIED} == set(OPEN)
    verdicts = {str(row.case["verdict"]) for row in rows}
    elsewhere = {f"tried by {claim.takes}" for claim in OPEN.values() if claim.benchmark}
    assert verdicts == {"not judged: quick", "cannot be judged here", *elsewhere}


def test_what_comes_near_because_its_inputs_were_chosen_is_by_construction() -> None:
    names = ("osdp", "dsp_bytes", "diloco", "osp")
    rows = papers(BenchPlan(recipes=names), silent)
    assert {row.case["verdict"] for row in rows} <= {"by construction", "not judged"}
    assert [row.notes["verdict"] for row in rows if row.notes] == ["by construction"] * len(names)


@given(st.data())
@pytest.mark.parametrize("name", TRIED)
def test_a_computed_figure_is_never_reproduced_nor_partly(name: str, data: st.DataObject) -> None:
    recipe = TRIED[name]
    computed = [each for each in recipe.figures if each.computed or recipe.evidence == "computed"]
    for figure in computed:
        ends = [end for band in (figure.reproduced or (), figure.partly) for end in band]
        value = data.draw(VALUES | st.sampled_from([*ends, 1.0]))
        assert figure.verdict(value, recipe.evidence) in ("by construction", "not", "not judged")
        assert "reproduced" not in figure.rule(recipe.evidence)
    if recipe.evidence == "computed":
        values = {figure.name: [data.draw(VALUES)] for figure in recipe.figures}
        assert recipe.verdict(values) in ("by construction", "not", "not judged")


def test_how_figures_come_about_is_what_the_recipe_does() -> None:
    assert {name for name, each in TRIED.items() if each.trial is not None} == {
        name for name, each in TRIED.items() if each.evidence == "trained"
    }
    measured = {name for name, each in TRIED.items() if each.how.startswith("measured")}
    assert measured == {name for name, each in TRIED.items() if each.evidence == "measured"}
    assert {name for name, each in TRIED.items() if each.evidence == "simulated"} == {"psp"}
    arithmetic = {"osp", "sync_switch", "diloco", "dsp_bytes", "ad_psgd", "osdp"}
    assert arithmetic <= {name for name, each in TRIED.items() if each.evidence == "computed"}


def test_what_was_computed_counts_less_than_what_was_trained_beside_it_unless_it_speaks_against_it() -> None:
    figures = (level("trained"), close("computed", 5.0, computed=True))
    recipe = msgspec.structs.replace(made([]), figures=figures, evidence="trained")
    assert recipe.verdict({"trained": [1.0], "computed": [5.0]}) == "reproduced"
    assert recipe.verdict({"trained": [1.1], "computed": [5.0]}) == "partly"
    assert recipe.verdict({"trained": [1.0], "computed": [1.0]}) == "not"


@given(st.floats(0.02, 100), st.floats(0.0, 3.0))
def test_a_ratio_is_judged_by_its_share_of_the_published_gain_however_near_1_it_is(
    gain: float, share: float
) -> None:
    assume(all(abs(share - edge) > 1e-6 for edge in (0.25, 0.85, 1.15)))
    expected = "reproduced" if 0.85 <= share <= 1.15 else "partly" if share >= 0.25 else "not"
    assert close("f", 1 + gain).by_rule(1 + share * gain) == expected
    assert close("f", 1 / (1 + gain)).by_rule(1 / (1 + share * gain)) == expected
    assert up_to("f", 1 + gain, inputs="paper's").by_rule(1 + share * gain) == expected
    assert between("f", 1 + gain, 1 + gain).by_rule(1 + share * gain) == expected


@given(st.floats(1.05, 100), VALUES)
def test_the_best_of_a_sweep_over_our_own_inputs_is_partly_at_most_and_more_than_was_claimed_says_so(
    published: float, value: float
) -> None:
    ours, papers_own = (up_to("f", published, inputs=inputs) for inputs in ("ours", "paper's"))
    assert ours.by_rule(value) in ("partly", "not")
    upper = 1 + 1.15 * (published - 1)
    assert (papers_own.remark(value) == BEYOND) == (upper < value < inf)
    assert papers_own.remark(value) == ours.remark(value)
    if value > upper:
        assert papers_own.by_rule(value) == "partly"


def test_a_figure_beyond_the_claim_says_so_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = (up_to("good", 2.0, inputs="ours"), *made([]).figures[1:])
    recipe = msgspec.structs.replace(made([], good=5.0), figures=figures)
    monkeypatch.setattr(bench, "TRIED", {"made": recipe})
    row, *_ = papers(BenchPlan(recipes=("made",)), silent)
    assert (row.value, row.remark, row.case["verdict"]) == (5.0, BEYOND, "partly")


@pytest.mark.parametrize(
    ("figure", "verdicts"),
    [
        (
            close("f", 2.0),
            {1.84: "partly", 1.86: "reproduced", 2.14: "reproduced", 2.16: "partly", 1.24: "not"},
        ),
        (close("f", 1.22), {1.05: "not", 1.15: "partly", 1.19: "reproduced"}),
        (close("f", 0.5), {0.46: "partly", 0.47: "reproduced", 0.79: "partly", 0.81: "not"}),
        (close("f", 0.5, "share"), {0.29: "not", 0.31: "partly", 0.5: "reproduced", 0.71: "not"}),
        (
            up_to("f", 10, inputs="paper's"),
            {8.6: "partly", 8.7: "reproduced", 11.3: "reproduced", 11.4: "partly", 3.2: "not"},
        ),
        (up_to("f", 10, inputs="ours"), {8.7: "partly", 11.4: "partly", 3.2: "not"}),
        (
            between("f", 4, 8),
            {1.7: "not", 3.5: "partly", 3.6: "reproduced", 9.0: "reproduced", 9.1: "partly"},
        ),
        (at_most("f", 0.5, "half"), {0.1: "reproduced", 0.5: "reproduced", 0.6: "partly", 0.96: "not"}),
        (level("f"), {0.84: "not", 0.86: "partly", 0.96: "reproduced", 1.06: "partly", 1.16: "not"}),
        (exact("f", 2.0), {2.0: "reproduced", 2.00001: "not"}),
        (beyond("f", "faster"), {1.01: "not", 1.05: "partly", 1.2: "reproduced"}),
        (shown_only("f"), {0.0: "not judged", 9.0: "not judged"}),
    ],
)
def test_a_verdict_is_what_the_rule_says(figure: Figure, verdicts: dict[float, str]) -> None:
    assert {value: figure.verdict(value, "measured") for value in verdicts} == verdicts


def test_every_kind_of_rule_is_listed_and_no_recipe_makes_one_of_its_own() -> None:
    made = inspect.getmembers(
        rules, lambda each: inspect.isfunction(each) and not each.__name__.startswith("_")
    )
    kinds = {name for name, each in made if each.__annotations__.get("return") == "Figure"}
    assert set(re.findall(r"^- `(\w+)`", rules.__doc__ or "", re.MULTILINE)) == kinds
    folder = Path(str(rules.__file__)).parent
    makers = {path.name for path in folder.rglob("*.py") if re.search(r"\bFigure\(", path.read_text())}
    assert makers == {"recipe.py", "plot.py"}


def made(run: list[str], good: float = 2.0, bad: float = 2.0) -> Recipe:
    def values(plan: BenchPlan) -> Values:
        run.append("ran")
        return {"good": [good], "bad": [bad], "seen": [0.0]}

    figures = (close("good", 2.0), close("bad", 2.0), shown_only("seen"))
    return Recipe(
        name="made",
        paper="paper",
        claim="claim",
        source="source",
        setup="set-up",
        evidence="measured",
        how="made up",
        figures=figures,
        run=values,
        explained="explained",
    )


@given(st.floats(0.5, 4), st.floats(0.5, 4))
def test_a_recipe_is_as_good_as_its_worst_figure(good: float, bad: float) -> None:
    recipe, order = made([]), ["reproduced", "partly", "not"]
    each = [figure.by_rule(value) for figure, value in zip(recipe.figures, (good, bad), strict=False)]
    verdict = recipe.verdict({"good": [good], "bad": [bad], "seen": [0.0]})
    assert verdict == max(each, key=order.index)


def test_what_is_kept_is_not_run_again_unless_rule_or_seed_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    plan = BenchPlan(recipes=("made",), results=str(tmp_path / "kept.jsonl"))
    monkeypatch.setattr(bench, "TRIED", {"made": made(ran)})
    first, again = papers(plan, silent), papers(plan, silent)
    assert (first, len(ran)) == (again, 1)
    papers(msgspec.structs.replace(plan, seed=1), silent)
    stricter = msgspec.structs.replace(made(ran), figures=(exact("good", 2.0), *made(ran).figures[1:]))
    monkeypatch.setattr(bench, "TRIED", {"made": stricter})
    papers(plan, silent)
    assert len(ran) == 3


def test_what_this_machine_cannot_try_is_not_run_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    lacking = msgspec.structs.replace(made(ran), lacks=lambda: "no testbed: not root")
    monkeypatch.setattr(bench, "TRIED", {"made": lacking})
    (row,) = papers(BenchPlan(recipes=("made",)), silent)
    assert (row.case["verdict"], row.remark, ran) == ("cannot be judged here", "no testbed: not root.", [])


class Pretended(TrialTrainer):
    """Counts its runs, of which nobody learns."""

    runs = 0

    def _run(self, work: TrialRun) -> Course:
        Pretended.runs += 1
        return Course(seen=[(1.0, 10, 0.1)], seconds=1.0, samples=10)


def trained(monkeypatch: pytest.MonkeyPatch, plan: BenchPlan, value: float) -> BenchRow:
    """The row of a trial whose only judged figure is always the same."""

    def judged(runs: Courses) -> dict[str, float]:
        return {"good": value}

    sides = {"x": Side(protocol="bsp")}
    trial = Trial(cluster="workers = 1", workers=1, sides=sides, lr=1.0, epochs=1)
    figures = (level("good"),)
    recipe = msgspec.structs.replace(made([]), run=None, trial=trial, judged=judged, figures=figures)
    monkeypatch.setattr(bench, "TRIED", {"made": recipe})
    monkeypatch.setattr(bench, "TrialTrainer", Pretended)
    (row,) = papers(msgspec.structs.replace(plan, recipes=("made",)), silent)
    return row


def test_a_ratio_to_what_was_never_reached_is_told_in_words_and_survives_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = trained(monkeypatch, BenchPlan(), inf)
    assert (row.value, row.remark, row.case["over seeds"], row.case["verdict"]) == (
        None,
        NEVER,
        "never, 3",
        "not",
    )
    assert msgspec.json.decode(msgspec.json.encode(row), type=BenchRow) == row


def test_figures_of_a_trial_are_read_off_its_kept_courses_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept.jsonl"
    plan, before = BenchPlan(results=str(kept)), Pretended.runs
    assert trained(monkeypatch, plan, inf).value is None
    read_off = bench.Tried("made", bench.TRIED["made"].fingerprint, __version__, 0, False, {"good": [9.0]})
    keep(kept, read_off)  # as before figures were read off again
    assert trained(monkeypatch, plan, 2.0).value == 2.0
    assert Pretended.runs - before == 3


def test_what_was_found_out_about_the_digits_is_not_said_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    digits, images = (trained(monkeypatch, BenchPlan(data=data), 1.0) for data in (None, "cifar"))
    assert digits.notes["explained"] == "explained"
    assert "explained" not in images.notes
    assert str(images.case["how"]).endswith("CIFAR-10")


def sequence_row(way: str, link: str, workers: int, value: float) -> BenchRow:
    figure: Literal["seconds", "speedup"] = "seconds" if way == "dynamic" else "speedup"
    return BenchRow(
        case={"way": way, "link": link, "workers": workers}, measured={}, figure=figure, value=value
    )


def test_the_gain_over_the_best_of_the_others_is_the_smallest_of_one_link_and_not_across_links() -> None:
    rows = [sequence_row("dynamic", link, 2, 99.0) for link in ("fast", "slow")]
    rows += [sequence_row("ulysses", "fast", 2, 1.1), sequence_row("megatron", "fast", 2, 1.9)]
    rows += [sequence_row("ulysses", "slow", 2, 1.5), sequence_row("megatron", "slow", 2, 4.0)]
    assert (gain(rows, min), gain(rows, max)) == (1.5, 4.0)
    assert gain([*rows, sequence_row("ring", "slow", 2, 1.2)], min) == 1.2


def test_a_recorded_value_is_judged_by_the_rule_that_stands_today() -> None:
    good, before = close("good", 2.0), beyond("good", "faster")
    loose = msgspec.structs.replace(made([]), figures=(before,), explained="then")
    strict = msgspec.structs.replace(loose, figures=(good,), explained="now")
    recorded = bench._rows(loose, {"good": [1.5]}, quick=False)
    assert recorded[0].notes["verdict"] == "reproduced"
    (row,) = judged_again(strict, recorded)
    assert (row.value, row.case["verdict"], row.case["published"]) == (1.5, "partly", "2.00x")
    assert (row.notes["verdict"], row.notes["rule"]) == ("partly", strict.rule)
    never = [msgspec.structs.replace(recorded[0], value=None, remark=NEVER)]
    assert judged_again(strict, never)[0].remark == NEVER


def test_an_interrupted_run_goes_on_with_the_recipe_that_was_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def interrupted(plan: BenchPlan) -> Values:
        raise KeyboardInterrupt

    second = msgspec.structs.replace(made(ran), name="second", run=interrupted)
    plan = BenchPlan(results=str(tmp_path / "kept.jsonl"))
    monkeypatch.setattr(bench, "TRIED", {"made": made(ran), "second": second})
    with pytest.raises(KeyboardInterrupt):
        papers(plan, silent)
    monkeypatch.setattr(
        bench, "TRIED", {"made": made(ran), "second": msgspec.structs.replace(made(ran), name="second")}
    )
    papers(plan, silent)
    assert len(ran) == 2


def test_progress_says_which_of_how_many_and_the_time_left() -> None:
    said: list[str] = []
    papers(BenchPlan(quick=True, recipes=("osdp", "dsp_bytes")), said.append)
    assert [text.split(":")[0] for text in said] == ["papers, 1 of 2, osdp", "papers, 2 of 2, dsp_bytes"]
    assert all("s left" in text for text in said)


def test_words_after_papers_are_recipes_unless_they_name_a_benchmark() -> None:
    assert apart(["papers", "dssp", "store", "osp"]) == (["papers", "store"], ("dssp", "osp"))
    assert apart(["store", "dssp"]) == (["store", "dssp"], ())
    assert not set(BENCHMARKS) & {*TRIED, *OPEN}
    assert not set(TRIED) & set(OPEN)
    with pytest.raises(ConfigError, match="Did you mean 'dssp'"):
        chosen(["papers"], BenchPlan(recipes=("dsp",)))
