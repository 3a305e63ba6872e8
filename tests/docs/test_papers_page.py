"""The page of the papers' claims is what its script makes of the records and the recipes."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from paceline.bench.papers.recipe import NEVER

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import papers_page  # noqa: E402


def test_the_page_is_what_records_and_recipes_give() -> None:
    assert papers_page.page() == papers_page.PAGE.read_text()
    assert papers_page.drawn() == papers_page.PICTURE.read_text()


def test_what_another_benchmark_tries_is_judged_by_its_newest_record() -> None:
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


def test_a_record_of_another_set_up_or_rule_is_not_shown_as_the_recipes() -> None:
    records = {path: papers_page.read(path) for path in papers_page.in_order()}
    _, rows = papers_page.found(records)["ssp"]
    for note in ("set-up", "rule"):
        other = msgspec.structs.replace(rows[0], notes=rows[0].notes | {note: "another"})
        assert papers_page.fits(papers_page.TRIED["ssp"], rows[0])
        assert not papers_page.fits(papers_page.TRIED["ssp"], other)


def test_what_was_never_reached_and_results_on_images_are_shown_as_what_they_are() -> None:
    path, (first, *rest) = papers_page.found({p: papers_page.read(p) for p in papers_page.in_order()})["sdde"]
    notes = {key: note for key, note in first.notes.items() if key != "explained"}
    never = msgspec.structs.replace(first, value=None, remark=NEVER)
    kept = papers_page.found({path: msgspec.structs.replace(papers_page.read(path), rows=[never, *rest])})
    assert f"| {NEVER} |" in papers_page.section("sdde", *kept["sdde"])
    explained = papers_page.TRIED["sdde"].explained
    images = msgspec.structs.replace(first, notes=notes)
    assert explained in papers_page.section("sdde", path, [first, *rest])
    assert explained not in papers_page.section("sdde", path, [images, *rest])
