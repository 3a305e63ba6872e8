"""One warm engine for all real runs, and a look after each test at what it left behind."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_timeout

from support import hypothesis_profile
from support.sampling import evenly

if TYPE_CHECKING:  # tests that start no process need not import torch
    from support.runs import Lab
    from support.shell import Shell
    from support.testbed import Testbeds


BENCH = Path(__file__).resolve().parents[1] / "bench"
"""The benchmarks' package lies here, whether it is installed or not."""
MOST_CASES = 1
"""Of a test with real processes, so many cases are run unless all are asked for."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-case", action="store_true", help="run all cases of tests with real processes, and long tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile of property tests, and make Ctrl-C and SIGQUIT work: what a shell starts in the
    background ignores them, and so would every command of the tests. `pythonpath` tells only this process
    where the benchmarks are; others are told here."""
    paths = [str(BENCH), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    hypothesis_profile.load(every_case=config.getoption("--every-case"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """pytest-timeout sets its timer once per test: a second try, and one that hangs again, needs its own."""
    if getattr(item, "execution_count", 1) > 1:
        hooks, settings = item.config.pluginmanager.hook, pytest_timeout._get_item_settings(item)
        hooks.pytest_timeout_cancel_timer(item=item)
        hooks.pytest_timeout_set_timer(item=item, settings=settings)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every protocol times every model times every fault takes long: by default each test tries some of its
    cases, always the same ones, and different tests different ones."""
    if config.getoption("--every-case"):
        return
    left_out = {item for item in items if item.get_closest_marker("long")}
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.parent.name in ("e2e", "scripts") or item.get_closest_marker("some"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, some in cases.items():
        marker = some[0].get_closest_marker("some")
        left_out |= set(some).difference(evenly(some, marker.args[0] if marker else MOST_CASES, name))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show also why a test failed that passed when it was tried again: somewhere there is a race."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"failed at the first try: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture(scope="session")
def warm_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The engine is started once: importing torch takes seconds, forking takes none."""
    from support.runs import Lab

    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()
    lab.settle()


@pytest.fixture
def lab(warm_lab: Lab, tmp_path: Path) -> Iterator[Lab]:
    """A place for this test's runs. When the test is over, none of their processes may be left."""
    warm_lab.root = tmp_path
    yield warm_lab
    warm_lab.settle()


@pytest.fixture
def in_scripts(lab: Lab) -> Callable[[str], Path]:
    """Write a script that can import the cases."""
    from support.runs import SCRIPTS

    def write(text: str) -> Path:
        return lab.script(f"import sys\n\nsys.path.insert(0, {str(SCRIPTS)!r})\n{text}")

    return write


@pytest.fixture
def shell(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """The `paceline` command in this process, on the warm engine."""
    from support.shell import Shell

    return Shell(lab, monkeypatch)


@pytest.fixture
def testbeds() -> Iterator[Testbeds]:
    """Real hosts on this machine; skips where there may be none."""
    from support.testbed import testbeds_for_a_test

    with testbeds_for_a_test() as beds:
        yield beds
