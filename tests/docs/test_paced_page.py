"""The page that compares the paced protocols is what its script makes of simulations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.protocols import PACED

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import paced_page  # noqa: E402


def test_every_paced_protocol_has_a_row_on_every_cluster() -> None:
    rows = {row.split(":")[0].removesuffix(" + balance") for row in paced_page.ROWS}
    assert rows == set(PACED)
    text = paced_page.PAGE.read_text()
    for title in paced_page.CLUSTERS.values():
        section = text.split(f"## {title}\n")[1].split("\n## ")[0]
        for row in paced_page.ROWS:
            assert f"| `{row}` |" in section


@pytest.mark.long
@pytest.mark.timeout(180)
def test_simulated_again_a_row_is_the_same_to_the_last_digit() -> None:
    found = paced_page.simulated("straggler", ("bsp",), paced_page.SEEDS)
    baseline_s = paced_page.to_target_s(found["bsp"])
    assert paced_page.line("bsp", found["bsp"], baseline_s) in paced_page.PAGE.read_text().splitlines()


def results(*seconds: float | None) -> list[dict[str, object]]:
    return [{"time_to_target_s": s, "samples_per_s": 10.0} for s in seconds]


def test_a_median_that_was_not_reached_is_not_made_up() -> None:
    assert paced_page.to_target_s(results(3.0, None, 5.0)) == 5.0
    assert paced_page.to_target_s(results(None, None, 5.0)) is None


def test_the_sentences_follow_the_figures() -> None:
    soon = paced_page.verdicts({"bsp": results(9.0), "sync_switch": results(3.0), "psp": results(None)})
    assert soon[0] == "- Soonest at 90 %: `sync_switch` (3.0 s), `bsp` (9.0 s)."
    assert soon[1] == "- Not there within 10 epochs in most runs: `psp`."
    assert any("3.00 times as fast as `bsp`" in text for text in soon)
    late = paced_page.verdicts({"bsp": results(3.0), "sync_switch": results(9.0)})
    assert any("0.33 times as fast as `bsp`" in text for text in late)
