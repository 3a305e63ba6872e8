"""The documentation site builds without a warning, can be searched, and loads nothing from the internet."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.parallel.registry import SPLITS
from paceline.protocols import PACED, PEERS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import site_pages  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "scripts", "benchmarks", "examples", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("_build", "made"))
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "docs", "built"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder / "built"


@pytest.mark.timeout(240)
def test_every_protocol_has_a_page_with_its_settings_and_paper(site: Path) -> None:
    for name in [*PACED, *PEERS, *SPLITS]:
        page = (site / f"made/protocols/{name}.html").read_text()
        assert "Use it when" in page, name
        assert "<h2>Paper" in page, name
    drawn = [name for name in PACED if "pl-timeline" in (site / f"made/protocols/{name}.html").read_text()]
    assert drawn == list(PACED)


@pytest.mark.timeout(240)
def test_the_reference_has_what_a_script_calls_and_every_flag_of_train(site: Path) -> None:
    assert "Pace.prepare" in (site / "reference-api.html").read_text()
    assert "--checkpoint-every" in (site / "made/commands/train.html").read_text()


@pytest.mark.timeout(240)
def test_nothing_is_loaded_from_the_internet_and_the_search_is_there(site: Path) -> None:
    assert (site / "searchindex.js").stat().st_size > 10_000
    loads = re.compile(r"""(?:src|href)=["'](https?:)?//[^"']+\.(?:js|css|woff2?|png|svg)["']""")
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text()), page.name


def test_the_figures_on_staleness_show_waiting_in_lockstep_and_none_without_a_bound() -> None:
    lockstep, unbound = site_pages.staleness_figures().split("`asp`:")
    waits = [re.findall(r">(\d+) %<", figure) for figure in (lockstep, unbound)]
    assert max(map(int, waits[0])) >= 30
    assert waits[1] == ["0"] * site_pages.WORKERS
    assert "made/staleness.md" in (ROOT / "docs" / "explain-staleness.md").read_text()
