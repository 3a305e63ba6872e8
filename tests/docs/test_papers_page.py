"""The page of the papers' claims is what its script makes of the records and the recipes."""

from __future__ import annotations

import sys
from math import inf
from pathlib import Path

import msgspec

from paceline_bench.papers.recipe import BEYOND, NEVER

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import papers_page  # noqa: E402


def test_the_page_is_what_records_and_recipes_give() -> None:
    assert papers_page.page() == papers_page.PAGE.read_text()
    assert papers_page.drawn() == papers_page.PICTURE.read_text()


def test_what_another_benchmark_tries_is_judged_by_its_record() -> None:
    other = papers_page.elsewhere()["ps_ddp_fsdp_eval"]
    row = other.findings[0]
    inside, outside = (
        msgspec.structs.replace(row, case=row.case | {"published range": range_}) for range_ in ("in", "out")
    )
    verdicts = {
        other._replace(findings=seen).verdict
        for seen in ([inside, inside], [inside, outside], [outside, outside])
    }
    assert len(other.findings) == 6
    assert verdicts == {"reproduced", "partly", "not"}
    assert other._replace(findings=[inside, outside]).verdict == "partly"


def test_a_record_of_another_set_up_or_without_a_figure_is_not_shown_as_the_recipes() -> None:
    rows = papers_page.found(papers_page.read())["ssp"]
    other = msgspec.structs.replace(rows[0], notes=rows[0].notes | {"set-up": "another"})
    assert papers_page.fits(papers_page.TRIED["ssp"], rows)
    assert not papers_page.fits(papers_page.TRIED["ssp"], [other, *rows[1:]])
    assert not papers_page.fits(papers_page.TRIED["ssp"], rows[:1])


def test_a_record_is_judged_by_the_rule_of_today() -> None:
    for name, rows in papers_page.found(papers_page.read()).items():
        recipe = papers_page.TRIED[name]
        assert rows[0].notes["rule"] == recipe.rule, name
        values = {str(row.case["claimed"]): [float(inf if row.value is None else row.value)] for row in rows}
        assert rows[0].notes["verdict"] == recipe.verdict(values), name


def test_a_claim_that_another_benchmark_measures_is_judged_by_its_figures() -> None:
    others = papers_page.elsewhere()
    osp = others["osp_measured"]
    name = osp.claim.figures[0].name
    shown = [
        papers_page._line_elsewhere("osp_measured", osp._replace(values=osp.values | {name: value}))
        for value in (1.05, 1.3, 1.9)
    ]
    assert [line.split("[")[1].split("]")[0] for line in shown] == ["not", "partly", "partly"]
    assert [BEYOND in line for line in shown] == [False, False, True]
    assert osp.verdict == "not"
    assert {each.name for each in osp.claim.figures} == {*osp.values}


def test_the_page_counts_no_claim_as_reproduced_that_is_computed() -> None:
    page = papers_page.PAGE.read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "| computed |" in line]
    assert rows
    assert not [line for line in rows if "[reproduced]" in line or "[partly]" in line]


def test_what_was_never_reached_and_results_on_images_are_shown_as_what_they_are() -> None:
    record = papers_page.read()
    first, *rest = papers_page.found(record)["sdde"]
    notes = {key: note for key, note in first.notes.items() if key != "explained"}
    never = msgspec.structs.replace(first, value=None, remark=NEVER)
    kept = papers_page.found(msgspec.structs.replace(record, rows=[never, *rest]))
    assert f"| {NEVER} |" in papers_page.section("sdde", record, kept["sdde"])
    explained = papers_page.TRIED["sdde"].explained
    images = msgspec.structs.replace(first, notes=notes)
    assert explained in papers_page.section("sdde", record, [first, *rest])
    assert explained not in papers_page.section("sdde", record, [images, *rest])
