"""Verdicts follow the rules of their recipes, results are kept, and every recipe runs in its quick form."""

from __future__ import annotations

import inspect
import re
from math import inf
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import __version__
from paceline.bench.harness.plan import BenchPlan
from paceline.bench.harness.record import BenchRow
from paceline.bench.harness.run import BENCHMARKS, apart, chosen
from paceline.bench.kept import keep
from paceline.bench.papers import papers as bench
from paceline.bench.papers import recipe as rules
from paceline.bench.papers.measured import gain
from paceline.bench.papers.papers import NOT_TRIED, OPEN, TRIED, papers
from paceline.bench.papers.recipe import (
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
from paceline.bench.papers.training import TrialTrainer
from paceline.bench.papers.trial import Course, Courses, Side, Trial, TrialRun
from paceline.errors import ConfigError

OVI = OPEN["ps_ddp_fsdp_eval"]


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
    assert verdicts == {"not judged: quick", "cannot be judged here", f"tried by {OVI.takes}"}


def test_what_is_exact_or_a_formula_is_reproduced() -> None:
    rows = papers(BenchPlan(recipes=("osdp", "dsp_bytes", "diloco", "osp")), silent)
    assert {row.case["verdict"] for row in rows} <= {"reproduced", "not judged"}


@pytest.mark.parametrize(
    ("figure", "verdicts"),
    [
        (
            close("f", 2.0),
            {1.69: "partly", 1.71: "reproduced", 2.29: "reproduced", 2.31: "partly", 1.04: "not"},
        ),
        (close("f", 0.5), {0.42: "partly", 0.43: "reproduced", 0.94: "partly", 0.96: "not"}),
        (close("f", 0.5, "share"), {0.29: "not", 0.31: "partly", 0.5: "reproduced", 0.71: "not"}),
        (up_to("f", 10), {8.4: "partly", 8.6: "reproduced", 99.0: "reproduced", 1.0: "not"}),
        (
            between("f", 4, 8),
            {1.04: "not", 3.3: "partly", 3.5: "reproduced", 9.1: "reproduced", 9.3: "partly"},
        ),
        (at_most("f", 0.5, "half"), {0.1: "reproduced", 0.5: "reproduced", 0.6: "partly", 0.96: "not"}),
        (level("f"), {0.84: "not", 0.86: "partly", 0.96: "reproduced", 1.06: "partly", 1.16: "not"}),
        (exact("f", 2.0), {2.0: "reproduced", 2.00001: "not"}),
        (beyond("f", "faster"), {1.01: "not", 1.05: "partly", 1.2: "reproduced"}),
        (shown_only("f"), {0.0: "not judged", 9.0: "not judged"}),
    ],
)
def test_a_verdict_is_what_the_rule_says(figure: Figure, verdicts: dict[float, str]) -> None:
    assert {value: figure.verdict(value) for value in verdicts} == verdicts


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
        how="made up",
        figures=figures,
        run=values,
        explained="explained",
    )


@given(st.floats(0.5, 4), st.floats(0.5, 4))
def test_a_recipe_is_as_good_as_its_worst_figure(good: float, bad: float) -> None:
    recipe, order = made([]), ["reproduced", "partly", "not"]
    each = [figure.verdict(value) for figure, value in zip(recipe.figures, (good, bad), strict=False)]
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
