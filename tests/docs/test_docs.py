"""README and docs are true: every command in them runs, every snippet too, every link leads somewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from paceline.testbed import records, why_not
from paceline.testbed.bed import take_down
from support.runs import Lab
from support.shell import Shell

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "log").glob("*.md"))
MADE = ("made/",)
"""Below docs/: what `make docs` makes before it reads the pages."""
BIN = Path(sys.executable).parent
RUN_ELSEWHERE = (
    "make ",
    "pip install paceline",
    "paceline bench cluster --quick --protocols bsp",
    "paceline bench peers --quick",
    "paceline bench cluster --simulated --quick --protocols asp,bsp",
)
"""`make test` is what runs this file; `make demo` is tried from a fresh clone; the benchmarks take long, and
tests/bench/test_cluster.py and test_peers.py run them and look at what they find."""

TESTBED = "lab"
"""The one that the pages make."""

WARM = ("train", "compare", "simulate", "replay", "protocols", "report", "why", "advise", "plan", "profile")
"""Commands that run in this process, on an engine that is warm already. Only the README's start anew."""
KEEPS_RUNS = WARM[:4]
BRIEF = ("paceline protocols", "paceline advise staleness", "paceline doctor")
"""Commands that train nothing, and need nothing of the commands before them."""


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for text in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S):
            found.append((page.name, text))
    return found


def commands() -> list[Any]:
    """All of them. `make test` leaves out what trains on pages other than the README."""
    found = []
    for page in PAGES:
        if page.name == "tutorial.md":
            continue  # tests/docs/test_tutorial.py runs it, step by step
        lines = [
            line.split("  #")[0].strip()
            for name, text in blocks("sh")
            if name == page.name
            for line in text.splitlines()
        ]
        lines = [line for line in lines if line and not line.startswith(("#", *RUN_ELSEWHERE))]
        for line in lines:
            later = page.name != "README.md" and not line.startswith(BRIEF)
            found.append(pytest.param(page.name, line, marks=[pytest.mark.long] if later else []))
    return found


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("docs")
    for name in ("examples", "recipes"):
        shutil.copytree(ROOT / name, folder / name)
    before = records.names()
    yield folder
    if TESTBED in records.names() and TESTBED not in before:  # a page that broke off
        take_down(TESTBED)


@pytest.fixture(scope="module")
def engine_here(warm_lab: Lab, workplace: Path) -> Iterator[None]:
    """Scripts are looked for where the engine was started, as they are from a shell."""
    warm_lab.close()
    with chdir(workplace):
        assert warm_lab.engine
    yield
    warm_lab.close()


@pytest.fixture(scope="module")
def background() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Commands that a page starts with `&`; those that do not end by themselves are ended with the pages."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.terminate()
        process.wait(20)


def skip_if_impossible(text: str) -> None:
    reason = why_not()
    if ("testbed" in text or "bench cluster" in text) and reason is not None:
        pytest.skip(reason)
    if "--engine ray" in text:
        pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")
    if "--engine spark" in text or "pyspark" in text:
        pytest.importorskip("pyspark", reason="needs PySpark: pip install 'paceline[spark]'")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: value[:60])
def test_every_command_of_the_docs_runs(
    page: str,
    line: str,
    workplace: Path,
    background: list[subprocess.Popen[bytes]],
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    skip_if_impossible(line)
    words = shlex.split(line)
    if page != "README.md" and words[0] == "paceline" and words[1] in WARM and "&" not in line:
        if words[1] in KEEPS_RUNS:
            request.getfixturevalue("engine_here")
        monkeypatch.chdir(workplace)
        runs = ("--runs", "runs") if words[1] in KEEPS_RUNS else ()
        done = shell(words[1], *runs, *words[2:])
        assert done.code == 0, f"{page}: {line}\n{done.out}\n{done.err}"
    else:
        run_anew(page, line, workplace, background)


def run_anew(page: str, line: str, folder: Path, background: list[subprocess.Popen[bytes]]) -> None:
    """As a person types it, in a shell."""
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    if line.endswith("&"):
        command = ["bash", "-c", f"exec {line.removesuffix('&')}"]
        background.append(subprocess.Popen(command, cwd=folder, env=environment))
        return
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert done.returncode == 0, f"{page}: {line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("page", "text"), blocks("python"), ids=lambda value: value[:20])
def test_every_snippet_of_the_docs_runs(page: str, text: str, tmp_path: Path) -> None:
    skip_if_impossible(text)
    script = tmp_path / "snippet.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=230, check=False
    )
    assert done.returncode == 0, f"{page}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        made = page.parent.name == "docs" and target.startswith(MADE)
        assert made or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_no_line_of_the_readme_is_wider_than_a_laptop() -> None:
    wide = [line for line in (ROOT / "README.md").read_text().splitlines() if len(line) > 120]
    assert not wide
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_reference_names_every_protocol_with_its_promise() -> None:
    from paceline.protocols import PACED, PEERS
    from paceline.protocols.settings import about

    lines = (ROOT / "docs" / "reference-protocols.md").read_text().splitlines()
    for name in [*PACED, *PEERS]:
        row = next(line for line in lines if line.startswith(f"| `{name}` |"))
        assert about(name).promise.rstrip(".") in row


def test_every_call_of_a_pace_is_in_the_reference() -> None:
    from paceline.runtime.worker.pace import Pace

    internal = {"depart", "end", "left", "withholds"}  # for whoever runs a script, not for it
    calls = {name for name in vars(Pace) if not name.startswith("_")} - internal
    text = (ROOT / "docs" / "reference-script.md").read_text()
    assert not [name for name in calls if f"`pace.{name}" not in text]


def test_every_file_that_the_design_names_is_there() -> None:
    """A name is a path below `src/paceline` or `bench`, or the end of one."""
    text = (ROOT / "docs" / "design.md").read_text()
    packages = [ROOT / "src" / "paceline", ROOT / "bench" / "paceline_bench"]
    files = [path.relative_to(ROOT).as_posix() for package in packages for path in package.rglob("*")]
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", text):
        assert any(
            f"/{file}/".endswith(f"/{name.rstrip('/')}/")
            for file in [*files, "src/paceline", "bench/paceline_bench", "tests/contract"]
        ), name
