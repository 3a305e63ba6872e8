"""Testbeds for tests: made on demand, gone with the test, skipped where they cannot be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from paceline.testbed import BedHost, HostSpec, Testbed, why_not
from paceline.testbed.cpu import find_controller
from paceline.testbed.network import NAMESPACES
from paceline.testbed.records import STATE


class Testbeds:
    """Makes testbeds that live until the test ends.

    bed = testbeds({"a": HostSpec(link_mbit=1000), "b": HostSpec(cpu=0.5)})
    bed = testbeds("a", "b", link_mbit=400)
    """

    __test__ = False

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.names: list[str] = []

    def __call__(self, *hosts: dict[str, HostSpec] | str, **each: float) -> Testbed:
        specs: dict[str, HostSpec] = {}
        for item in hosts:
            specs |= {item: HostSpec(**each)} if isinstance(item, str) else item
        bed = self._stack.enter_context(Testbed.up(specs))
        self.names.append(bed.name)
        return bed


@contextmanager
def testbeds_for_a_test() -> Iterator[Testbeds]:
    """Skip without the privileges; afterwards nothing of any of its testbeds may be left."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        beds = Testbeds(stack)
        yield beds
    for name in beds.names:
        assert traces_of(name) == []


def traces_of(name: str) -> list[str]:
    """All that exists of a testbed: namespaces, control groups, records. Processes are in the namespaces."""
    controller = find_controller()
    folders = [NAMESPACES, STATE, *([controller.root] if controller else [])]
    paths = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return sorted(str(path) for path in paths if _belongs(path, name))


def _belongs(path: Path, name: str) -> bool:
    return path.name in (name, f"paceline.{name}") or path.name.startswith(f"paceline.{name}.")


def python(host: BedHost, code: str, *args: object, timeout_s: float = 30.0) -> str:
    """Run some Python on a host, and return what it printed; it has to succeed."""
    done = host.run([sys.executable, "-c", code, *map(str, args)], timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
